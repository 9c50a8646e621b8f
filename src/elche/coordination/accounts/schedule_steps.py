"""Count of the learning rate scheduler steps due in an epoch of windows.

One device steps a scheduler every few batches, its *period*. In windows a rank's own
batches do not measure the run's progress, so the loop's calls determine only the
period. Ranks agree on it at every reduction. The due steps follow from the samples that
the run has trained on, by the same function on every rank. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, final

from elche.coordination.accounts.step_count import ROUNDING
from elche.coordination.protocol.messages import Runs
from elche.errors import MismatchError

_COUNTS = "batches", "calls", "last_call", "agreed", "skipped"
"""Counts of `ScheduleSteps` that are saved as they are."""


@final
class ScheduleSteps:
    """Steps of one scheduler in one epoch.

    Periods restart with every epoch, as in ``if (i + 1) % k == 0``: an incomplete
    last period gives no step.

    Args:
        of_epoch: number of global batches in the epoch.
        most: steps that the schedule has left; None if it has no end.
        ahead: surplus steps of the previous epoch, which ended early; this epoch
            skips them.

    Attributes:
        taken: steps taken in this epoch, plus ``ahead``.
    """

    def __init__(self, of_epoch: int, most: int | None = None, ahead: int = 0) -> None:
        self._of_epoch = of_epoch
        self._most = None if most is None else most + ahead
        self._gaps: Counter[int] = Counter()
        self._batches = self._calls = self._last_call = self._agreed = 0
        self._skipped = 0.0
        self.taken = ahead

    def skip(self, batches: float) -> None:
        """Starts after this many batches, which are done and scheduled already."""
        self._skipped = batches

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts so far."""
        return {
            "gaps": [list(each) for each in sorted(self._gaps.items())],
            "taken": self.taken,
            **{name: getattr(self, f"_{name}") for name in _COUNTS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`; the schedule has its state of that time."""
        self._gaps = Counter(dict(state["gaps"]))
        for name in _COUNTS:
            setattr(self, f"_{name}", state[name])
        if self._most is not None:
            self._most += state["taken"] - self.taken
        self.taken = state["taken"]

    @property
    def is_called_for(self) -> bool:
        """True if the loop has called the scheduler more often than it was stepped."""
        return self._calls > self.taken

    @property
    def period(self) -> int:
        """Batches from one step to the next; 0 before the first call on any rank."""
        return self._agreed or self._seen

    @property
    def report(self) -> tuple[int, int]:
        """This rank's number of calls, and their period."""
        return self._calls, self._seen

    @property
    def _seen(self) -> int:
        """Most frequent number of batches between two calls.

        After a single call: the batches up to it or those since, whichever are more.
        """
        if self._gaps:
            return self._gaps.most_common(1)[0][0]
        since = self._batches - self._last_call + 1
        return max(self._last_call, since) if self._calls else 0

    def called(self) -> bool:
        """Records a call in the current batch; returns False for a repeated call."""
        now = self._batches + 1
        if self._calls and now == self._last_call:
            return False
        if self._calls:
            self._gaps[now - self._last_call] += 1
        self._calls += 1
        self._last_call = now
        return True

    def batch_done(self) -> None:
        """Counts a finished batch."""
        self._batches += 1

    def agree(self, period: int) -> None:
        """Adopts the period that all ranks agreed on; 0 if no rank has called yet."""
        self._agreed = period or self._agreed

    def due(self, batches: float, *, is_agreed: bool = False) -> int:
        """Returns the steps to take after this many global batches of the epoch.

        Args:
            batches: global batches, planned ones included; may have a fraction.
            is_agreed: use only the agreed period, for a step that all ranks take.
        """
        period = self._agreed if is_agreed else self.period
        return self._owed(min(batches, self._of_epoch - 1), period)

    def due_at_end(self, batches: float) -> int:
        """Returns the steps to take when the epoch has ended after ``batches``."""
        return self._owed(batches, self.period)

    def ahead(self, batches: float) -> int:
        """Returns the surplus steps when the epoch has ended after ``batches``."""
        period = self.period
        return max(0, self.taken - int(batches + ROUNDING) // period) if period else 0

    def _owed(self, batches: float, period: int) -> int:
        steps = int(batches + ROUNDING) // period if period else 0
        steps -= int(self._skipped + ROUNDING) // period if period else 0
        if self._most is not None:
            steps = min(steps, self._most)
        return max(0, steps - self.taken)


def common_periods(reports: Mapping[int, Runs]) -> tuple[int, ...]:
    """Returns each scheduler's period: that of the rank with the most calls.

    Args:
        reports: `ScheduleSteps.report` of each rank's schedulers.

    Raises:
            MismatchError: ranks registered different numbers of schedulers.
    """
    counts = {rank: len(report) for rank, report in reports.items()}
    if len(set(counts.values())) > 1:
        raise MismatchError(
            f"ranks follow different numbers of schedulers ({counts} by rank): call "
            "elche.follow for the same schedulers on every rank"
        )
    return tuple(max(each)[1] for each in zip(*reports.values(), strict=True))
