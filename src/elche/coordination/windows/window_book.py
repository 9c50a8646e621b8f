"""Accounts of windows: each rank's work, and pending reports. Pure.

Under ``cadence`` all ranks are in one window. *Overlapped*, a rank that has closed the
window being collected is in the next one already, so there are two accounts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from elche.coordination.accounts.batch_ranges import Range, append_range
from elche.coordination.protocol.events import BatchesDone, WindowClosed
from elche.errors import ProtocolError, TransitionError


class PartPhase(Enum):
    """Phases of one rank's part of a window; other transitions are refused.

    =============  ========  ===================================================
    from           to        when
    =============  ========  ===================================================
    UNOPENED       OPEN      an `OpenWindow` is sent
    OPEN           CLOSING   a `CloseWindow` is sent
    CLOSING        OPEN      `CloseWindow` must be sent again, with ``drain``
    OPEN, CLOSING  CLOSED    the rank's `WindowClosed` is received
    =============  ========  ===================================================

    *Overlapped*, a rank that has closed its window trains in the next window before
    that is opened.
    """

    UNOPENED = auto()
    OPEN = auto()
    CLOSING = auto()
    CLOSED = auto()


_BEFORE = {
    PartPhase.OPEN: (PartPhase.UNOPENED, PartPhase.CLOSING),
    PartPhase.CLOSING: (PartPhase.OPEN,),
    PartPhase.CLOSED: (PartPhase.OPEN, PartPhase.CLOSING),
}


@dataclass(slots=True)
class Part:
    """One rank's part of one window.

    ``trained`` are its batch ranges, ``samples`` its samples with a weight.
    ``permitted`` is the most batches that it may run, None without a limit.
    ``is_diverged``: the update is not finite, or the window has one batch since an
    earlier update was not; pacing ignores the rank's wait. ``is_drained``: the rank was
    notified of the epoch's end before the part began.
    """

    batches: int = 0
    samples: int = 0
    timed: int = 0
    timed_s: float = 0.0
    closed: WindowClosed | None = None
    trained: list[Range] = field(default_factory=list)
    phase: PartPhase = PartPhase.UNOPENED
    permitted: int | None = None
    is_diverged: bool = False
    is_drained: bool = False

    @property
    def is_open(self) -> bool:
        """True if it was opened for its rank and is not closed."""
        return self.phase in (PartPhase.OPEN, PartPhase.CLOSING)

    def train(self, event: BatchesDone) -> None:
        """Adds batches that its rank reports."""
        self.batches += event.stop - event.start
        self.samples += event.samples
        self.timed += event.timed
        self.timed_s += event.timed_s
        append_range(self.trained, (event.start, event.stop))

    def move(self, to: PartPhase) -> None:
        """Changes the phase.

        Raises:
            TransitionError: the phase cannot be reached from the current one.
        """
        if self.phase not in _BEFORE[to]:
            raise TransitionError(
                f"a window cannot go from {self.phase.name} to {to.name}"
            )
        self.phase = to

    @property
    def weight(self) -> float:
        """Weight in the mean: the one its rank reported, or its samples."""
        by_user = None if self.closed is None else self.closed.weight
        return float(self.samples) if by_user is None or not self.samples else by_user


class WindowBook:
    """Parts of the window being collected and, overlapped, of the next window."""

    def __init__(self, ranks: Iterable[int], window: int) -> None:
        self.window = window
        self.ahead = {rank: Part() for rank in ranks}
        self._begin()

    def _begin(self) -> None:
        self.parts = self.ahead
        self.ahead = {rank: Part() for rank in self.parts}
        self._open = len(self.parts)

    @property
    def all_closed(self) -> bool:
        """True if every rank has closed the window being collected."""
        return self._open == 0

    @property
    def any_closed(self) -> bool:
        """True if any rank has closed the window being collected."""
        return self._open < len(self.parts)

    def window_of(self, rank: int) -> int:
        """Returns the window that a rank trains in."""
        return self.window + (self.parts[rank].closed is not None)

    def part(self, rank: int) -> Part:
        """Returns a rank's part of the window that it trains in."""
        part = self.parts[rank]
        return part if part.closed is None else self.ahead[rank]

    def batches_since(self, rank: int) -> int:
        """Returns a rank's batches since the last synchronisation began."""
        return self.parts[rank].batches + self.ahead[rank].batches

    def trained(self, event: BatchesDone) -> None:
        """Adds batches that a rank reports.

        Raises:
            ProtocolError: the rank is in another window.
        """
        if event.window != self.window_of(event.rank):
            raise ProtocolError(
                f"rank {event.rank} trains in window {event.window}, expected window "
                f"{self.window_of(event.rank)}"
            )
        self.part(event.rank).train(event)

    def close(self, event: WindowClosed) -> None:
        """Records that a rank has closed the window being collected.

        Raises:
            ProtocolError: the rank is not in that window, or its weight is invalid.
        """
        part = self.parts.get(event.rank)
        if part is None or not part.is_open or event.window != self.window:
            raise ProtocolError(
                f"rank {event.rank} closes window {event.window}, expected to close "
                f"window {self.window} once"
            )
        if event.weight is not None and not 0.0 <= event.weight < math.inf:
            raise ProtocolError(
                f"rank {event.rank} closes window {event.window} with a weight of "
                f"{event.weight}, expected a finite weight of at least 0"
            )
        part.move(PartPhase.CLOSED)
        part.closed = event
        self._open -= 1

    def reopen_closing(self) -> None:
        """Reopens closing windows, so that `CloseWindow` is sent again at the end."""
        for rank in self.parts:
            part = self.part(rank)
            if part.phase is PartPhase.CLOSING:
                part.move(PartPhase.OPEN)

    def advance(self) -> None:
        """Starts collecting the next window."""
        self._begin()
        self.window += 1

    def unopened(self) -> list[int]:
        """Returns ranks for which the window being collected is not opened yet."""
        return [r for r, p in self.parts.items() if p.phase is PartPhase.UNOPENED]

    def remove(self, rank: int) -> None:
        """Removes a lost rank."""
        part = self.parts.pop(rank)
        self.ahead.pop(rank)
        self._open -= part.closed is None


class Throttle:
    """Counts batches since the last synchronisation and limits each rank's lead.

    Until the next synchronisation a rank may run at most ``max_batch_diff`` batches
    more than the slowest rank (one if it is 0, which is lockstep). That also holds when
    the slowest rank has ended its window.

    Args:
        max_batch_diff: the largest lead; None sets no limit.
        ranks: the members.
    """

    def __init__(self, max_batch_diff: int | None, ranks: Iterable[int]) -> None:
        self._lead = None if max_batch_diff is None else max(1, max_batch_diff)
        self._done = dict.fromkeys(ranks, 0)
        self._stopped: set[int] = set()
        self._slowest = 0

    @property
    def limit(self) -> int | None:
        """Batches since the last synchronisation that any rank may run now."""
        return None if self._lead is None else self._slowest + self._lead

    @property
    def is_final(self) -> bool:
        """True if the limit cannot rise, since the slowest ranks have stopped."""
        if self._lead is None or not self._done:
            return False
        late = (r for r, batches in self._done.items() if batches == self._slowest)
        return self._stopped.issuperset(late)

    def holds(self, batches: int) -> bool:
        """True if a rank that has run ``batches`` would wait in vain."""
        return self.limit is not None and batches >= self.limit and self.is_final

    def done(self, rank: int, batches: int) -> bool:
        """Records a rank's batches; returns True if the limit has risen."""
        if self._lead is None or rank in self._stopped:
            return False
        before, self._done[rank] = self._slowest, batches
        self._slowest = min(self._done.values())
        return self._slowest > before

    def stop(self, rank: int) -> None:
        """Records that a rank runs no more batches until the next synchronisation."""
        self._stopped.add(rank)

    def remove(self, rank: int) -> None:
        """Removes a lost rank."""
        self._done.pop(rank, None)
        self._slowest = min(self._done.values(), default=self._slowest)


def check_claim(event: BatchesDone, samples: int) -> None:
    """Rejects wrong sample counts, and times that are negative or not finite.

    Raises:
        ProtocolError: the claim is impossible; the batches hold ``samples``.
    """
    if event.samples != samples:
        raise ProtocolError(
            f"rank {event.rank} claims {event.samples} samples of batches "
            f"{event.start}..{event.stop - 1}, which have {samples}"
        )
    times = (event.busy_s, event.data_wait_s, event.transfer_s, event.timed_s)
    if not all(0.0 <= time_s < math.inf for time_s in times) or not (
        0 <= event.timed <= event.stop - event.start
    ):
        raise ProtocolError(
            f"rank {event.rank} reports times that cannot have been measured: {event}"
        )
