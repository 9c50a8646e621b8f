"""First choice of ``auto``: how many steps are measured before it. Pure.

Steps are granted one by one until the choice is made. The first one is not warm, and
tells little; one of equal parts follows, which shows what local steps of windows take.
In the next the fastest rank gets all but the least part of each other one: that shows
what it would take alone, and what a step of the others costs however small. So in turn,
until several ranks are clearly better than that device, or worse. What steps after the
first take longer than needed is bounded by a part of the run, or of the gain that may
be there; where the first reduction was that long, on a slow link, it may decide for one
device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from elche.cadence.chooser import Choice, best_together
from elche.cadence.goodput import Fleet, MeasuredCluster
from elche.coordination.auto.measures import Measures
from elche.coordination.protocol.events import StepsDone

MEASURING_COST = 0.01
"""Part of the run that steps after the first may take, beyond what the choice would."""
FREE_COST = 0.0025
"""Part of it for which a choice that seems clear is made sure of."""
GAIN_COST = 0.06
"""Part of a gain that may be there to be spent on finding out."""
LEAST_STEPS = 2
"""Warm steps before ``sync`` of several ranks is a choice. Windows, which are for good,
take one: beside a first step that has compiled any reduction looks quick."""
USUAL_STEPS = 6
"""Warm steps that make a choice clear."""
MOST_STEPS = 24
"""Warm steps before the choice, at most."""


@final
class FirstChoice:
    """Account of the steps before the first choice, and of their `Measures`."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._lost_s = 0.0
        self._is_first = True

    def spared(self, cluster: MeasuredCluster) -> tuple[int, ...]:
        """Ranks with the least part of the next step: in turn all but the fastest."""
        if not self._measures.count % 2:
            return ()
        batch_s = _batch_s(cluster, cluster.global_batch_size)
        fastest = min(batch_s, key=batch_s.__getitem__)
        return tuple(rank for rank in cluster.ranks if rank != fastest)

    def is_due(
        self,
        reports: Sequence[StepsDone],
        cluster: MeasuredCluster,
        spared: Sequence[int],
    ) -> bool:
        """True if a further step, in which some get the least part, is not worth it."""
        steps, doubt = self._measures.count, cluster.doubt
        fleet = Fleet(cluster, drops=True)
        gain = best_together(fleet)
        shown_s = min(report.sync_wait_s for report in reports)
        busy_s = [report.busy_s for report in reports]
        # What a batch takes if the choice is what by now is the least to expect.
        usual_s = fleet.predict("sync", 1).window_s / max(1.0, gain * (1.0 - doubt))
        if not self._is_first:
            self._lost_s += max(busy_s) + shown_s - usual_s
        self._is_first = False
        next_s = max(0.0, _step_s(cluster, spared) + shown_s - usual_s)
        # Of a first step nobody knows which part was compiling.
        run_s = cluster.run_batches * (usual_s if steps else min(busy_s))
        cost = (self._lost_s + next_s) / run_s
        most, least = gain * (1.0 + doubt), gain * (1.0 - doubt)
        if steps >= MOST_STEPS or (self._measures.has_sizes and most < 1.0):
            return True
        if least >= 1.0:
            return cost > (MEASURING_COST if steps < USUAL_STEPS else FREE_COST)
        worth = GAIN_COST * (most - 1.0) if steps else 0.0
        return cost > max(MEASURING_COST, worth)

    def accepts(self, choice: Choice) -> bool:
        """True if so few steps are enough for this choice."""
        needed = LEAST_STEPS if choice.carried_out_by == "sync" else 1
        return choice.is_alone or self._measures.count >= needed


def _batch_s(cluster: MeasuredCluster, samples: float) -> dict[int, float]:
    """Seconds of so many samples on each rank."""
    costs = zip(cluster.fixed_s, cluster.seconds_per_sample, strict=True)
    times_s = (fixed_s + samples * sample_s for fixed_s, sample_s in costs)
    return dict(zip(cluster.ranks, times_s, strict=True))


def _step_s(cluster: MeasuredCluster, spared: Sequence[int]) -> float:
    """About what a step takes in which these ranks get the least part."""
    whole_s = _batch_s(cluster, cluster.global_batch_size)
    rate = sum(1.0 / each_s for r, each_s in whole_s.items() if r not in spared)
    return max(1.0 / rate, *_batch_s(cluster, cluster.min_share_samples).values())
