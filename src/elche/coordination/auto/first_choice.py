"""First choice of ``auto``: number of steps to measure before it. Pure.

Steps are granted one by one until the choice is made. The first step is not warm and
measures little. Then two kinds of steps alternate. Steps of equal shares measure the
local steps of windows. In the other kind, the fastest rank trains all but the other
ranks' least shares. That measures the fastest rank alone, and the others' fixed cost.
Measuring ends when several ranks are clearly better or worse than the fastest device.
The extra time of steps after the first is bounded by a fraction of the run, or of the
possible gain. If the first reduction alone exceeds that bound, on a slow link, the
choice may be one device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from elche.cadence.chooser import Choice, best_together
from elche.cadence.goodput import Fleet, MeasuredCluster
from elche.coordination.auto.measures import Measures
from elche.coordination.protocol.events import StepsDone

MEASURING_COST = 0.01
"""Fraction of the run that measured steps after the first may cost extra."""
FREE_COST = 0.0025
"""Fraction of the run that may be spent to confirm a choice that seems clear."""
GAIN_COST = 0.06
"""Fraction of a possible gain that may be spent on measuring it."""
LEAST_STEPS = 2
"""Warm steps before ``sync`` of several ranks is chosen. Windows, which are final, need
one: compared with a first step that compiled, any reduction looks cheap."""
USUAL_STEPS = 6
"""Warm steps after which a choice is clear."""
MOST_STEPS = 24
"""Most warm steps before the choice."""


@final
class FirstChoice:
    """Decides when the `Measures` of the first steps suffice for a choice."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._lost_s = 0.0
        self._is_first = True

    def minimal(self, cluster: MeasuredCluster) -> tuple[int, ...]:
        """Returns ranks to get least shares: in turn none, or all but the fastest."""
        if not self._measures.count % 2:
            return ()
        batch_s = _batch_s(cluster, cluster.global_batch_size)
        fastest = min(batch_s, key=batch_s.__getitem__)
        return tuple(rank for rank in cluster.ranks if rank != fastest)

    def is_due(
        self,
        reports: Sequence[StepsDone],
        cluster: MeasuredCluster,
        minimal: Sequence[int],
    ) -> bool:
        """True if another step, with least shares for ``minimal``, does not pay."""
        steps, doubt = self._measures.count, cluster.doubt
        fleet = Fleet(cluster, drops=True)
        gain = best_together(fleet)
        shown_s = min(report.sync_wait_s for report in reports)
        busy_s = [report.busy_s for report in reports]
        # Time of a batch under the choice, for the least gain to be expected.
        usual_s = fleet.predict("sync", 1).window_s / max(1.0, gain * (1.0 - doubt))
        if not self._is_first:
            self._lost_s += max(busy_s) + shown_s - usual_s
        self._is_first = False
        next_s = max(0.0, _step_s(cluster, minimal) + shown_s - usual_s)
        # The part of a first step that was compilation is unknown.
        run_s = cluster.run_batches * (usual_s if steps else min(busy_s))
        # One step size does not show fixed costs, so a second one is measured.
        lost_s = self._lost_s if steps > 1 or self._measures.has_sizes else 0.0
        cost = (lost_s + next_s) / run_s
        most, least = gain * (1.0 + doubt), gain * (1.0 - doubt)
        if steps >= MOST_STEPS or (self._measures.has_sizes and most < 1.0):
            return True
        if least >= 1.0:
            return cost > (MEASURING_COST if steps < USUAL_STEPS else FREE_COST)
        worth = GAIN_COST * (most - 1.0) if steps else 0.0
        return cost > max(MEASURING_COST, worth)

    def accepts(self, choice: Choice) -> bool:
        """True if the measured steps suffice for this choice."""
        needed = LEAST_STEPS if choice.carried_out_by == "sync" else 1
        return choice.is_alone or self._measures.count >= needed


def _batch_s(cluster: MeasuredCluster, samples: float) -> dict[int, float]:
    """Returns the time (s) of ``samples`` samples on each rank."""
    costs = zip(cluster.ranks, cluster.fixed_s, cluster.seconds_per_sample, strict=True)
    return {rank: fixed_s + samples * cost for rank, fixed_s, cost in costs}


def _step_s(cluster: MeasuredCluster, minimal: Sequence[int]) -> float:
    """Estimates the time (s) of a step with the least share for ``minimal``."""
    whole_s = _batch_s(cluster, cluster.global_batch_size)
    rate = sum(1.0 / each_s for r, each_s in whole_s.items() if r not in minimal)
    return max(1.0 / rate, *_batch_s(cluster, cluster.min_share_samples).values())
