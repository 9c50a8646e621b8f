"""``auto``: calibration, from a run's first steps to its first choice.

After one grant of steps if something is much better, after the very first step where
reductions are slow, and otherwise after grants in which either half of the ranks got
the least part, because equal ranks do not show what a batch costs however small. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from elche.cadence.chooser import Choice, Chooser
from elche.cadence.goodput import predict
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


@dataclass(frozen=True, slots=True)
class Found:
    """The first choice, who made it, and by which measurements."""

    choice: Choice
    chooser: Chooser
    gauge: Gauge


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

    def prepare(self, probe_s: float, *, is_new: bool) -> None:
        """An epoch is about to begin.

        Args:
            probe_s: what one reduction takes.
            is_new: nothing has been measured.
        """
        self._probe_s = self._probe_s or probe_s
        self._sync.grant_singly(is_new and self._probe_s >= SLOW_REDUCTION_S)

    def break_off(self) -> None:
        """No choice will be made: steps are shared among all again."""
        self._spared = []
        self._sync.grant_again()
        self._sync.grant_singly(False)
        self._sync.spare(())

    def quick_check(
        self, reports: Sequence[StepsDone], batch_size: int
    ) -> Found | None:
        """The first step was run, on devices that are not warm yet.

        On a slow link each further one costs more than it tells: windows are chosen at
        once if by these times, too long as they are, they are twice as good. Speeds are
        measured in the first of them.
        """
        if self._probe_s < SLOW_REDUCTION_S:
            return None
        gauge = self._gauge.quick_gauge(reports, self._probe_s)
        found, gain = self._choose(gauge, batch_size)
        return found if gain >= GLANCE_GAIN and not found.choice.left_out else None

    def measured(self, ranks: Iterable[int], batch_size: int) -> Found | None:
        """A further grant was measured while nothing is chosen yet."""
        gauge = self._gauge
        if gauge.grants == 1:
            self._sync.grant_singly(False)
            gauge.learn(self._probe_s)
            found, gain = self._choose(gauge, batch_size)
            if gain >= EARLY_GAIN:
                return found
            halves = gauge.halves(ranks, batch_size)
            self._spared = [
                half for half in halves for _ in range(EXPLORING_GRANTS)
            ] + [()]
        if self._spared:
            self._sync.spare(self._spared.pop(0))
        if gauge.grants < self._grants:
            return None
        gauge.learn(self._probe_s)
        return self._choose(gauge, batch_size)[0]

    def _choose(self, gauge: Gauge, batch_size: int) -> tuple[Found, float]:
        """What would be chosen, and how much better than ``sync`` of all it is."""
        cluster = gauge.cluster(batch_size)
        chooser = self._new_chooser()
        choice = chooser.observe(cluster)
        gain = choice.prediction.goodput / predict("sync", cluster).goodput
        return Found(choice, chooser, gauge), gain
