"""Count of the learning rate scheduler steps due in an epoch of windows.

One device steps a scheduler every so many batches, its *period*. In windows a rank's
own batches say nothing about the run. So the loop's calls tell only the period, which
ranks agree on at every reduction, and the steps due follow the samples that the run has
trained on: the same function on every rank. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, final

from elche.coordination.accounts.step_count import ROUNDING
from elche.coordination.protocol.messages import Runs
from elche.errors import MismatchError


@final
class ScheduleSteps:
    """Steps of one scheduler in one epoch.

    Periods begin anew with every epoch, as in ``if (i + 1) % k == 0``: what is left of
    one at its end is no step.

    Args:
        of_epoch: global batches of the epoch.
        most: steps that the schedule has left; None without an end.
        ahead: steps taken too many in the epoch before, which ended early; as many of
            this one are passed over.

    Attributes:
        taken: steps taken in this epoch, and those that it was ahead.
    """

    def __init__(self, of_epoch: int, most: int | None = None, ahead: int = 0) -> None:
        self._of_epoch = of_epoch
        self._most = None if most is None else most + ahead
        self._gaps: Counter[int] = Counter()
        self._batches = self._calls = self._last_call = self._agreed = 0
        self._skipped = 0.0
        self.taken = ahead

    def skip(self, batches: float) -> None:
        """Starts after batches of the epoch that are done, schedule included."""
        self._skipped = batches

    def state_dict(self) -> dict[str, Any]:
        """Counts so far."""
        return {
            "gaps": [list(each) for each in sorted(self._gaps.items())],
            "batches": self._batches,
            "calls": self._calls,
            "last_call": self._last_call,
            "agreed": self._agreed,
            "skipped": self._skipped,
            "taken": self.taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`, with the schedule as it was then."""
        self._gaps = Counter({gap: count for gap, count in state["gaps"]})
        self._batches, self._calls = state["batches"], state["calls"]
        self._last_call, self._agreed = state["last_call"], state["agreed"]
        self._skipped = state["skipped"]
        if self._most is not None:
            self._most += state["taken"] - self.taken
        self.taken = state["taken"]

    @property
    def is_called_for(self) -> bool:
        """True if the loop has called it more often than it stepped."""
        return self._calls > self.taken

    @property
    def period(self) -> int:
        """Batches from one step to the next; 0 before the first call on any rank."""
        return self._agreed or self._seen

    @property
    def report(self) -> tuple[int, int]:
        """Number of calls of this rank's loop, and their period."""
        return self._calls, self._seen

    @property
    def _seen(self) -> int:
        """The usual number of batches between two calls.

        After a single call it is at least the batches before that call and those since.
        """
        if self._gaps:
            return self._gaps.most_common(1)[0][0]
        since = self._batches - self._last_call + 1
        return max(self._last_call, since) if self._calls else 0

    def called(self) -> bool:
        """Records a call in the current batch; False if there was one before."""
        now = self._batches + 1
        if self._calls and now == self._last_call:
            return False
        if self._calls:
            self._gaps[now - self._last_call] += 1
        self._calls += 1
        self._last_call = now
        return True

    def batch_done(self) -> None:
        """The loop has run a batch."""
        self._batches += 1

    def agree(self, period: int) -> None:
        """Adopts the period agreed on by all ranks; 0 before any call."""
        self._agreed = period or self._agreed

    def due(self, batches: float, *, is_agreed: bool = False) -> int:
        """Steps to take inside the epoch, after so many global batches of it.

        Args:
            batches: planned ones, and parts of one, too.
            is_agreed: only as far as all ranks know of, for a step in common.
        """
        period = self._agreed if is_agreed else self.period
        return self._owed(min(batches, self._of_epoch - 1), period)

    def due_at_end(self, batches: float) -> int:
        """Steps to take when the epoch has ended after so many global batches."""
        return self._owed(batches, self.period)

    def ahead(self, batches: float) -> int:
        """Steps taken too many when the epoch has ended after so many batches."""
        period = self.period
        return max(0, self.taken - int(batches + ROUNDING) // period) if period else 0

    def _owed(self, batches: float, period: int) -> int:
        steps = int(batches + ROUNDING) // period if period else 0
        steps -= int(self._skipped + ROUNDING) // period if period else 0
        if self._most is not None:
            steps = min(steps, self._most)
        return max(0, steps - self.taken)


def common_periods(reports: Mapping[int, Runs]) -> tuple[int, ...]:
    """The period of every scheduler: that of the rank that has called it most often.

    Args:
        reports: of each rank, `ScheduleSteps.report` of its schedulers.

    Raises:
        MismatchError: ranks have handed over other numbers of schedulers.
    """
    counts = {rank: len(report) for rank, report in reports.items()}
    if len(set(counts.values())) > 1:
        raise MismatchError(
            f"ranks have handed over other numbers of schedulers ({counts} by rank): "
            "call elche.follow for the same schedulers on every rank"
        )
    return tuple(max(each)[1] for each in zip(*reports.values(), strict=True))
