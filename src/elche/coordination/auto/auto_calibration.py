"""``auto``: calibration, from a run's first steps to its first choice.

Steps are granted one by one until the choice is made. The first one is not warm: it only
orders the ranks. Then either half of the ranks gets the least part in turn, so that all
run small and large parts: equal ranks do not show what a batch costs however small.
What these steps take longer than the fastest device alone is bounded by a part of the
run; where the first one was that long already, on a slow link, it decides. Pure.
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
EARLY_GAIN = 1.5
"""What is better by this factor once all have run two sizes is chosen at once."""
ROUNDS = 3
"""Grants of the least part to either half of the ranks, before the choice at latest."""


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
        self._sparing: list[tuple[int, ...]] = []
        self._left: list[tuple[int, ...]] = []
        self._probe_s = 0.0
        self._lost_s = 0.0

    def prepare(self, probe_s: float) -> None:
        """An epoch is about to begin; ``probe_s`` is what one reduction takes."""
        self._probe_s = self._probe_s or probe_s
        self._sync.grant_singly(True)

    def break_off(self) -> None:
        """No choice will be made, or it is made: steps are shared among all again."""
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
        is_warm = gauge.took_steps(reports)
        known = gauge if is_warm else gauge.quick_gauge(reports, self._probe_s)
        if not self._sparing:
            known.learn(self._probe_s)
            halves = known.halves(range(len(reports)), batch_size)
            self._sparing = halves if len(halves) > 1 else [(), *halves]
            self._left = self._sparing * ROUNDS
        rounds = ROUNDS - len(self._left) / len(self._sparing)
        known.learn(self._probe_s)
        cluster = known.cluster(batch_size)
        alone_s = Fleet(cluster).predict("sync", 1).window_s
        step_s = max(report.busy_s + report.sync_wait_s for report in reports)
        shown_s = min(report.sync_wait_s for report in reports)
        self._lost_s += step_s - alone_s if is_warm else shown_s
        most_s = MEASURING_COST * run_steps * alone_s
        is_over = self._lost_s + max(0.0, step_s - alone_s) > most_s
        if is_over or rounds >= 1.0 or not self._left:
            found = MeasuredChoice(known, self._new_chooser(), batch_size)
            if is_over or not self._left or found.gain >= EARLY_GAIN:
                return found
        self._sync.spare(self._left.pop(0))
        return None
