"""Accounts of windows: each rank's work, and the reports still due.

Under ``cadence`` all ranks are in one window. *Overlapped*, a rank that has closed the
window being collected is already in the next one, so there are two accounts. Pure.
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
    """Life of one rank's part of a window; any other transition is refused.

    =============  ========  ===================================================
    from           to        when
    =============  ========  ===================================================
    UNOPENED       OPEN      an `OpenWindow` is sent
    OPEN           CLOSING   a `CloseWindow` is sent
    CLOSING        OPEN      it must be sent again, with ``drain``
    OPEN, CLOSING  CLOSED    the rank's `WindowClosed` has come
    =============  ========  ===================================================

    *Overlapped*, a rank that has closed its window trains in the next one before that
    is opened.
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

    ``trained`` are its batches, ``samples`` those that weigh. ``permitted`` batches is
    the most that it has been allowed to run, None without a limit. Where
    ``is_diverged``, its update is not finite, or the one before was not and it is of
    one batch: its rank's wait for the others is left out of pacing. Where
    ``is_drained``, its rank knew that the epoch ends when it began it.
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
        """True if its rank has been sent it, and has not closed it."""
        return self.phase in (PartPhase.OPEN, PartPhase.CLOSING)

    def train(self, event: BatchesDone) -> None:
        """Counts batches that its rank reports."""
        self.batches += event.stop - event.start
        self.samples += event.samples
        self.timed += event.timed
        self.timed_s += event.timed_s
        append_range(self.trained, (event.start, event.stop))

    def move(self, to: PartPhase) -> None:
        """Goes to another phase.

        Raises:
            TransitionError: it cannot be reached from this one.
        """
        if self.phase not in _BEFORE[to]:
            raise TransitionError(
                f"a window cannot go from {self.phase.name} to {to.name}"
            )
        self.phase = to

    @property
    def weight(self) -> float:
        """Weight in a mean: as its rank reported it, or its samples."""
        said = None if self.closed is None else self.closed.weight
        return float(self.samples) if said is None or not self.samples else said


class WindowBook:
    """Parts of the window being collected, and of the next one where overlapped."""

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
        """True if a rank has."""
        return self._open < len(self.parts)

    def window_of(self, rank: int) -> int:
        """The window that a rank trains in."""
        return self.window + (self.parts[rank].closed is not None)

    def part(self, rank: int) -> Part:
        """A rank's part of the window that it trains in."""
        part = self.parts[rank]
        return part if part.closed is None else self.ahead[rank]

    def batches_since(self, rank: int) -> int:
        """Batches of a rank since the last synchronisation that was begun."""
        return self.parts[rank].batches + self.ahead[rank].batches

    def trained(self, event: BatchesDone) -> None:
        """Counts batches that a rank reports.

        Raises:
            ProtocolError: the window is not the one it is in.
        """
        if event.window != self.window_of(event.rank):
            raise ProtocolError(
                f"rank {event.rank} trains in window {event.window}, it should be in "
                f"{self.window_of(event.rank)}"
            )
        self.part(event.rank).train(event)

    def close(self, event: WindowClosed) -> None:
        """Takes a rank's end of the window being collected.

        Raises:
            ProtocolError: it is not in that window, or weighs what cannot be.
        """
        part = self.parts.get(event.rank)
        if part is None or not part.is_open or event.window != self.window:
            raise ProtocolError(
                f"rank {event.rank} closes window {event.window}, expected once and of "
                f"an open one; collected is window {self.window}"
            )
        if event.weight is not None and not 0.0 <= event.weight < math.inf:
            raise ProtocolError(
                f"rank {event.rank} closes window {event.window} with a weight of "
                f"{event.weight}, expected a finite one from 0 on"
            )
        part.move(PartPhase.CLOSED)
        part.closed = event
        self._open -= 1

    def tell_again(self) -> None:
        """Reopens closing windows, so that `CloseWindow` is sent again at the end."""
        for rank in self.parts:
            part = self.part(rank)
            if part.phase is PartPhase.CLOSING:
                part.move(PartPhase.OPEN)

    def advance(self) -> None:
        """Begins to collect the next window."""
        self._begin()
        self.window += 1

    def unopened(self) -> list[int]:
        """Ranks that have not been sent the window being collected."""
        return [r for r, p in self.parts.items() if p.phase is PartPhase.UNOPENED]

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        part = self.parts.pop(rank)
        self.ahead.pop(rank)
        self._open -= part.closed is None


class Throttle:
    """Counts batches since the last synchronisation and limits each rank's lead.

    A rank may run ``max_batch_diff`` batches more than the slowest one has (one, if
    that is 0: then all run in lockstep), until the next synchronisation: also when the
    slowest has ended its window.

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
        """True if the limit can rise no more: the slowest have all stopped."""
        if self._lead is None or not self._done:
            return False
        late = (r for r, batches in self._done.items() if batches == self._slowest)
        return self._stopped.issuperset(late)

    def holds(self, batches: int) -> bool:
        """True if a rank that has run so many waits in vain for the slowest."""
        return self.limit is not None and batches >= self.limit and self.is_final

    def done(self, rank: int, batches: int) -> bool:
        """A rank has run so many; True if the limit has risen."""
        if self._lead is None or rank in self._stopped:
            return False
        before, self._done[rank] = self._slowest, batches
        self._slowest = min(self._done.values())
        return self._slowest > before

    def stop(self, rank: int) -> None:
        """A rank runs no more batches until the next one."""
        self._stopped.add(rank)

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        self._done.pop(rank, None)
        self._slowest = min(self._done.values(), default=self._slowest)


def check_claim(event: BatchesDone, samples: int) -> None:
    """Refuses wrong sample counts, and times that are negative or not finite.

    Raises:
        ProtocolError: the rank cannot have done that, as its batches hold ``samples``.
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
