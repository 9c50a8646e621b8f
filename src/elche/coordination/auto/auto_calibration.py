"""``auto``: calibration, from a run's first steps to its first choice.

Steps are granted one by one until the choice is made. The first one is not warm, and
tells little; one of equal parts follows. Then the slower and the faster half of the
ranks get the least part in turn, so that all run small and large parts: equal ones do
not show what a batch costs however small. What these steps take longer than the fastest
device alone is bounded by a part of the run; where the first reduction was that long,
on a slow link, it decides. Pure.
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
"""Part of the run that measuring may take, beyond what one device would need for it."""
GAIN_COST = 0.1
"""Part of a predicted gain that may be spent beyond that to be sure of it."""
LEAST_STEPS = 2
"""Warm steps that a choice needs, if their reductions are no longer than that."""
MOST_STEPS = 6
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
        if not self._is_first:  # without the first one nothing is known at all
            self._lost_s += max(busy_s) + shown_s - alone_s
        self._is_first = False
        gain, doubt = best_together(fleet), known.doubt
        spared = known.to_spare(batch_size, steps) if steps else ()
        next_s = known.step_s(batch_size, spared) + shown_s - alone_s
        run_s = run_steps * (alone_s if steps else min(busy_s))
        cost = (self._lost_s + max(0.0, next_s)) / run_s
        best, worst = gain * (1.0 + doubt), gain * (1.0 - doubt)
        is_hopeless = known.has_sizes and best < 1.0
        goes_on = not is_hopeless and cost <= MEASURING_COST
        goes_on &= worst < 1.0 or steps < MOST_STEPS or cost <= MEASURING_COST / 4
        if steps and worst < 1.0:
            goes_on |= cost <= GAIN_COST * (best - 1.0)
        if steps >= 4 * MOST_STEPS or not goes_on:
            found = MeasuredChoice(known, self._new_chooser(), batch_size)
            if found.wants_windows or steps >= LEAST_STEPS:
                return found
        # Steps that are the choice by what is known cost nothing.
        self._sync.spare(spared)
        return None
