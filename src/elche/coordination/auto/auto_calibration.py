"""``auto``: calibration, from a run's first steps to its first choice.

After one grant of steps if something is much better, after the very first step where
reductions are slow, and otherwise after grants in which either half of the ranks got
the least part, because equal ranks do not show what a batch costs however small. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from elche.cadence.chooser import Chooser
from elche.cadence.goodput import predict
from elche.coordination.auto.auto_choice import MeasuredChoice
from elche.coordination.auto.auto_gauge import Gauge
from elche.coordination.protocol.events import StepsDone
from elche.coordination.sync.sync_policy import SyncPolicy

EARLY_GAIN = 1.5
"""What is better by this factor after a single grant is chosen at once."""
GLANCE_GAIN = 2.0
"""What is better by this factor after the very first step, which is not warm, too."""
SLOW_REDUCTION_S = 0.1
"""If one takes so long, steps are granted singly until the first is measured."""
EXPLORING_GRANTS = 2
"""So many grants of steps give either half of the ranks the least part before the
choice: those of the other half get large.
"""


@final
class Calibration:
    """Measures the first steps and makes the first choice.

    Args:
        gauge: what measures.
        sync: grants the steps.
        new_chooser: makes what chooses.
        ahead_steps: that are granted before any is measured.
    """

    def __init__(
        self,
        gauge: Gauge,
        sync: SyncPolicy,
        new_chooser: Callable[[], Chooser],
        ahead_steps: int,
    ) -> None:
        self._gauge = gauge
        self._sync = sync
        self._new_chooser = new_chooser
        self._grants = ahead_steps + 2 * EXPLORING_GRANTS
        self._spared: list[tuple[int, ...]] = []
        self._probe_s = 0.0

    def prepare(self, probe_s: float) -> None:
        """An epoch is about to begin; ``probe_s`` is what one reduction takes."""
        self._probe_s = self._probe_s or probe_s
        is_new = self._gauge.measurements == 0
        self._sync.grant_singly(is_new and self._probe_s >= SLOW_REDUCTION_S)

    def break_off(self) -> None:
        """No choice will be made: steps are shared among all again."""
        self._spared = []
        self._sync.grant_again()
        self._sync.grant_singly(False)
        self._sync.spare(())

    def take(
        self, reports: Sequence[StepsDone], batch_size: int
    ) -> MeasuredChoice | None:
        """All ranks have run a further grant; returns the first choice, if it is made.

        Args:
            reports: one of each rank, in order.
            batch_size: samples of a batch.
        """
        if self._gauge.took_steps(reports):
            return self._measured(len(reports), batch_size)
        is_first = self._gauge.measurements == 0
        return self._quick_check(reports, batch_size) if is_first else None

    def _quick_check(
        self, reports: Sequence[StepsDone], batch_size: int
    ) -> MeasuredChoice | None:
        """The first step was run, on devices that are not warm yet.

        On a slow link each further one costs more than it tells: windows are chosen at
        once if by these times, too long as they are, they are twice as good. Speeds are
        measured in the first of them.
        """
        if self._probe_s < SLOW_REDUCTION_S:
            return None
        gauge = self._gauge.quick_gauge(reports, self._probe_s)
        found, gain = self._choose(gauge, batch_size)
        return found if gain >= GLANCE_GAIN and not found.now.left_out else None

    def _measured(self, world_size: int, batch_size: int) -> MeasuredChoice | None:
        gauge = self._gauge
        if gauge.measurements == 1:
            self._sync.grant_singly(False)
            gauge.learn(self._probe_s)
            found, gain = self._choose(gauge, batch_size)
            if gain >= EARLY_GAIN:
                return found
            halves = gauge.halves(range(world_size), batch_size)
            self._spared = [
                half for half in halves for _ in range(EXPLORING_GRANTS)
            ] + [()]
        if self._spared:
            self._sync.spare(self._spared.pop(0))
        if gauge.measurements < self._grants:
            return None
        gauge.learn(self._probe_s)
        return self._choose(gauge, batch_size)[0]

    def _choose(self, gauge: Gauge, batch_size: int) -> tuple[MeasuredChoice, float]:
        """What would be chosen, and how much better than ``sync`` of all it is."""
        found = MeasuredChoice(gauge, self._new_chooser(), batch_size)
        all_in_step = predict("sync", gauge.cluster(batch_size))
        return found, found.now.prediction.goodput / all_in_step.goodput
