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

from elche.cadence.chooser import Chooser
from elche.cadence.goodput import Fleet
from elche.coordination.auto.auto_choice import MeasuredChoice
from elche.coordination.auto.auto_gauge import Gauge
from elche.coordination.protocol.events import StepsDone
from elche.coordination.sync.sync_policy import SyncPolicy

MEASURING_COST = 0.01
"""Part of the run that measuring may take, beyond what one device would need for it."""
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
        alone_s = Fleet(known.cluster(batch_size)).predict("sync", 1).window_s
        most_s = MEASURING_COST * run_steps * alone_s
        shown_s = min(report.sync_wait_s for report in reports)
        busy_s = [report.busy_s for report in reports]
        # What is compiled in the first step, one device would compile as well.
        usual_s = alone_s if steps else min(busy_s)
        self._lost_s += max(busy_s) + shown_s - usual_s
        spared = self._affordable(known, batch_size, most_s + alone_s - shown_s)
        # Were nothing fixed, one device would need so much longer for all parts.
        longest_s = MEASURING_COST * run_steps * len(busy_s) * min(busy_s)
        if spared is None and steps < LEAST_STEPS and shown_s <= longest_s:
            spared = known.halves(batch_size)[0] if steps else ()
        if spared is None or steps >= MOST_STEPS:
            found = MeasuredChoice(known, self._new_chooser(), batch_size)
            if found.wants_windows or steps >= LEAST_STEPS:
                return found
        # Steps that are the choice by what is known cost nothing.
        self._sync.spare(spared or ())
        return None

    def _affordable(
        self, known: Gauge, batch_size: int, most_s: float
    ) -> tuple[int, ...] | None:
        """Ranks that get the least part of the next step; None: it is too long."""
        steps, halves = self._gauge.measurements, known.halves(batch_size)
        first = halves[(steps - 1) % 2] if steps else ()
        for spared in (first, ()):
            if self._lost_s + known.step_s(batch_size, spared) <= most_s:
                return spared
        return None
