"""``auto``: calibration, from a run's first steps to its first choice.

Steps are granted one by one until the choice is made. The first one is not warm, and
tells little; one of equal parts follows, which shows what local steps of windows take.
In the next the fastest rank gets all but the least part of each other one: that shows
what it would take alone, and what a step of the others costs however small. So in turn,
until several ranks are clearly better than that device, or worse. What steps after the
first take longer than it is bounded by a part of the run, or of the gain that may be
there; where the first reduction was that long, on a slow link, it may decide for one
device alone. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from elche.cadence.chooser import Chooser, best_together
from elche.cadence.goodput import Fleet
from elche.coordination.auto.auto_choice import MeasuredChoice
from elche.coordination.auto.auto_gauge import Gauge
from elche.coordination.protocol.events import StepsDone
from elche.coordination.sync.sync_policy import SyncPolicy

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
class Calibration:
    """Measures the first steps and makes the first choice.

    Args:
        gauge: what measures.
        sync: grants the steps.
        new_chooser: makes what chooses.
    """

    def __init__(
        self, gauge: Gauge, sync: SyncPolicy, new_chooser: Callable[[], Chooser]
    ) -> None:
        self._gauge = gauge
        self._sync = sync
        self._new_chooser = new_chooser
        self._probe_s = 0.0
        self._lost_s = 0.0
        self._is_first = True

    def prepare(self, probe_s: float) -> None:
        """An epoch is about to begin; ``probe_s`` is what one reduction takes."""
        self._probe_s = self._probe_s or probe_s
        self._sync.grant_singly(True)

    def begin_anew(self) -> None:
        """A rank joins: what was measured is of others' steps."""
        self._probe_s, self._is_first = 0.0, True
        self._sync.spare(())
        self._sync.grant_singly(True)

    def break_off(self) -> None:
        """The choice is made, or none will be: steps are shared among all again."""
        self._sync.grant_again()
        self._sync.grant_singly(False)
        self._sync.spare(())

    def take(
        self, reports: Sequence[StepsDone], batch_size: int, run_steps: int
    ) -> MeasuredChoice | None:
        """All ranks have run a further step; returns the first choice, if it is made.

        Args:
            reports: one of each rank, in order.
            batch_size: samples of a batch.
            run_steps: global batches of the whole run.
        """
        gauge = self._gauge
        gauge.took_steps(reports)
        steps = gauge.measurements
        known = gauge if steps else gauge.quick_gauge(reports, self._probe_s)
        known.learn(self._probe_s)
        fleet = Fleet(known.cluster(batch_size), drops=True)
        alone_s = fleet.predict("sync", 1).window_s
        shown_s = min(report.sync_wait_s for report in reports)
        busy_s = [report.busy_s for report in reports]
        gain = best_together(fleet)
        # What a batch takes if the choice is what by now is the least to expect.
        usual_s = alone_s / max(1.0, gain * (1.0 - known.doubt))
        if not self._is_first:
            self._lost_s += max(busy_s) + shown_s - usual_s
        self._is_first = False
        spared = known.to_spare(batch_size, steps)
        next_s = max(0.0, known.step_s(batch_size, spared) + shown_s - usual_s)
        # Of a first step nobody knows which part was compiling.
        run_s = run_steps * (usual_s if steps else min(busy_s))
        cost = (self._lost_s + next_s) / run_s
        if not self._goes_on(known, gain, cost):
            found = MeasuredChoice(known, self._new_chooser(), batch_size)
            needed = 1 if found.wants_windows else LEAST_STEPS
            if found.now.is_alone or steps >= needed:
                return found
            spared = ()  # steps that are the choice by what is known cost nothing
        self._sync.spare(spared)
        return None

    def _goes_on(self, known: Gauge, gain: float, cost: float) -> bool:
        """Whether a further step is worth its cost.

        Args:
            known: what was measured.
            gain: goodput of several ranks by that, over the fastest device.
            cost: of it and those before, as a part of the run.
        """
        steps = self._gauge.measurements
        most, least = gain * (1.0 + known.doubt), gain * (1.0 - known.doubt)
        if steps >= MOST_STEPS or (known.has_sizes and most < 1.0):
            return False
        if least >= 1.0:
            return cost <= (MEASURING_COST if steps < USUAL_STEPS else FREE_COST)
        worth = GAIN_COST * (most - 1.0) if steps else 0.0
        return cost <= max(MEASURING_COST, worth)
