"""An encoded exchange carried out by a background thread while training goes on.

A :class:`BackgroundExchange` is a :class:`CodedExchange` whose work is done on another
thread: the training thread fills the contribution, calls
:meth:`BackgroundExchange.begin`, and later finds the sum decoded. Encoding, sending,
decoding and error feedback run on the group's `CodecThread`, as do a caller's
computations with the sum (:meth:`BackgroundExchange.follow_up`) and work that it defers
(:meth:`BackgroundExchange.put_off`).

Jobs are kept in a queue, and the thread that holds the lock runs them, in order. So a
caller that needs the outcome (:meth:`BackgroundExchange.wait`, a state, a commit) runs
the rest of the queue itself and depends on no other thread, and errors are raised
there: only the training thread asks the control channel for reasons.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, Protocol, final

import torch
from typing_extensions import override

from elche.comm.codec.codec_thread import BackgroundTask
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.codec.residual_exchange import ResidualExchange
from elche.errors import ProtocolError

SOONER = 0.5
"""It is looked for a sum again after this part of what is left of the time that the
last one took; each look costs 0.1 ms."""
OVERDUE = 0.125
"""One that takes longer is looked for after this part of the time that has passed."""
LEAST_PAUSE_S = 1e-3
MOST_PAUSE_S = 0.02


class _Turn(Enum):
    """What the training thread has asked for; written by it alone.

    ::

        NONE ──begin──> BEGUN ──follow_up──> FOLLOWED
         ^                │                     │
         └────────────────┴─────────────────────┘
           release of a sum that is there; commit or rollback, where the exchange
           can go on
    """

    NONE = "nothing is under way"
    BEGUN = "a message is under way"
    FOLLOWED = "a message is under way, and something is to be made of its sum"


class _Message(Enum):
    """How far the last message is.

    Written under the lock, by the thread that runs the jobs; only :meth:`begin` resets
    it without the lock, while no message is under way. Read by the training thread
    without it.

    =======================================  ====================  =======
    event                                    from                  to
    =======================================  ====================  =======
    ``begin``                                DECODED, MADE, ENDED  QUEUED
    the job that sends it                    QUEUED                SENT
    the sum has come, and is decoded (where
    it has memory)                           SENT                  DECODED
    what was to follow has been done         DECODED               MADE
    the caller waits for the sum itself      SENT                  ENDED
    an error, a rollback                     any                   ENDED
    ``finish``, of a sum not decoded so far  ENDED                 DECODED
    =======================================  ====================  =======
    """

    QUEUED = "begun, not sent yet"
    SENT = "the other thread looks for the sum"
    DECODED = "the sum is there"
    MADE = "so is what was to be made of it"
    ENDED = "nothing more is done here: failed, given up, or left to the caller"


SumReader = Callable[[int, int, torch.Tensor], None]
"""Writes the elements of a sum from one to another into memory."""

_FollowUp = tuple[Callable[[SumReader], None], Callable[[], bool]]


class TaskRunner(Protocol):
    """Calls :meth:`BackgroundTask.drive` soon, on another thread."""

    def serve(self, task: BackgroundTask) -> None:
        """The task has something to do; does not wait."""


@final
class BackgroundExchange(ResidualExchange):
    """An encoded exchange carried out on a thread beside the training thread.

    There is one contribution, to be filled anew after :meth:`settle`: it is read for a
    while after its sum has been taken, for what was left out of it. With memory for
    sums the exchange has two sides, and sums are decoded as they come and stay while
    the next message is under way. Without, a sum costs no memory: what has come of it
    is decoded whenever it is read.

    Args:
        coded: the exchange that does the work; used by this object only.
        driver: calls :meth:`drive`.
        sums: memory for a sum, of each side or of both.
    """

    keeps_contribution = True

    def __init__(
        self,
        coded: CodedExchange,
        driver: TaskRunner,
        sums: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(2 if sums else 1)
        self._sums = sums
        self._coded = coded
        self._driver = driver
        self._lock = threading.Lock()
        # Read and written under the lock, by either thread; the queue is appended to
        # without it, because a deque's append is atomic.
        self._to_do: deque[Callable[[], None]] = deque()
        self._follow: _FollowUp | None = None
        self._is_retired = False
        self._began_s = self._taken_s = 0.0
        # Written by the training thread; the codec thread reads the side.
        self._turn = _Turn.NONE
        self._side = 0
        # Written under the lock, read by the training thread without it.
        self._message = _Message.ENDED
        self._fault: Exception | None = None

    @property
    @override
    def sent_bytes(self) -> int:
        return self._coded.sent_bytes

    @property
    @override
    def remote_bytes(self) -> int:
        return self._coded.remote_bytes

    @property
    @override
    def extra_bytes(self) -> int:
        return self._coded.extra_bytes

    @override
    def contribution(self, side: int) -> torch.Tensor:
        return self._coded.contribution(0)

    def result(self, side: int) -> torch.Tensor:
        """The sum; it comes to have memory where it was given none."""
        if self._sums:
            return self._sums[side % len(self._sums)]
        return self._coded.result(0)

    def begin(self, side: int) -> None:
        """The contribution is complete; what fails is raised by :meth:`wait`.

        Raises:
            ProtocolError: another message is under way, or the exchange is broken.
        """
        if self._fault is not None:
            raise self._fault
        if self._turn is not _Turn.NONE:
            raise self._coded.untaken("begin()")
        self._side = side
        self._turn, self._message = _Turn.BEGUN, _Message.QUEUED
        self._to_do.append(self._send)
        self._driver.serve(self)

    def follow_up(
        self, work: Callable[[SumReader], None], is_adopted: Callable[[], bool]
    ) -> None:
        """Has something made of the sum before it is said to be there.

        What encoding took off is kept before that, so the sum must be adopted then.

        Args:
            work: is given what reads the sum until the next message is begun, and may
                change the contribution; once, on either thread, if a sum comes.
            is_adopted: whether a sum that is there will be, whoever dies; asked on
                either thread until it is.

        Raises:
            ProtocolError: no message is under way, or work follows it already.
        """
        if self._turn is not _Turn.BEGUN:
            is_second = self._turn is _Turn.FOLLOWED
            raise ProtocolError(
                "follow_up() came "
                + ("twice" if is_second else "when nothing is under way")
                + "; expected it once, after begin()"
            )
        self._turn = _Turn.FOLLOWED
        self._to_do.append(partial(setattr, self, "_follow", (work, is_adopted)))
        self._driver.serve(self)

    def put_off(self, work: Callable[[], None]) -> None:
        """Leaves work to the other thread, in turn; :meth:`settle` makes sure of it."""
        self._to_do.append(work)
        self._driver.serve(self)

    def settle(self) -> None:
        """Nothing is put off any more; waits for what is being done."""
        with self._caught_up():
            pass

    def drive(self) -> float | None:
        """One turn of the other thread; what fails is raised by :meth:`wait`."""
        with self._lock:
            if self._is_retired:
                return None
            self._catch_up()
            self._attempt(self._look)
            if self._message is not _Message.SENT and not self._waits_for_others:
                return None
        passed_s = time.monotonic() - self._began_s
        left_s = self._taken_s - passed_s
        pause_s = SOONER * left_s if left_s > 0.0 else OVERDUE * passed_s
        return min(max(pause_s, LEAST_PAUSE_S), MOST_PAUSE_S)

    def advance(self) -> None:
        """Nothing: that is the other thread's."""

    def poll(self) -> bool:
        """Whether the sum is there; a rank's death is seen by :meth:`wait`."""
        is_over = self._message is _Message.ENDED or self._is_complete
        return self._turn is _Turn.NONE or is_over

    @override
    def wait(self, what: str) -> None:
        if self._is_complete:
            return
        with self._caught_up() as coded:
            if self._message is _Message.SENT and self._turn is not _Turn.FOLLOWED:
                self._message = _Message.ENDED
            coded.wait(what)
            self._attempt(self._look)
            if self._fault is not None:
                raise self._fault
            if self._waits_for_others:
                raise ProtocolError(
                    f"{what}: wait() came before all other sums of the reduction were "
                    "there; expected it last"
                )

    @property
    @override
    def has_sum(self) -> bool:
        if self._turn is _Turn.NONE:
            return False
        with self._lock:
            self._catch_up()
            self._attempt(self._look)
            if self._message is _Message.ENDED:  # left to who waited for it
                return self._fault is None and self._coded.has_sum
            return self._is_complete

    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        if self._sums and self._message is _Message.DECODED:
            out.copy_(self.result(self._side)[start:stop])
            return
        with self._caught_up() as coded:
            coded.sum_into(start, stop, out)

    def release(self) -> None:
        """After the last :meth:`sum_into`: the sum is adopted, see :meth:`commit`."""
        if self._message is _Message.MADE:
            self._turn = _Turn.NONE
        elif self._turn is not _Turn.NONE and self._coded.has_arrived:
            self._turn = _Turn.NONE
            self._to_do.append(self._coded.release)
            self._driver.serve(self)

    @override
    def commit(self) -> None:
        with self._caught_up() as coded:
            coded.commit()
            if coded.is_idle:
                self._turn = _Turn.NONE

    @override
    def rollback(self) -> None:
        with self._caught_up() as coded:
            coded.rollback()
            self._message = _Message.ENDED
            if coded.is_idle:
                self._turn = _Turn.NONE

    @override
    def flush(self, what: str) -> None:
        with self._caught_up() as coded:
            coded.flush(what)

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._caught_up() as coded:
            return coded.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._caught_up() as coded:
            coded.load_state_dict(state)

    @override
    def retire(self) -> None:
        with self._lock:
            self._is_retired = True

    @property
    def _waits_for_others(self) -> bool:
        """Whether the sum is there, and what follows is not to begin yet."""
        is_there = self._message is _Message.DECODED
        return is_there and self._follow is not None

    @property
    def _is_complete(self) -> bool:
        """Whether the sum is decoded, and what was to be made of it has been."""
        if self._message is _Message.DECODED:
            return self._turn is not _Turn.FOLLOWED
        return self._message is _Message.MADE

    @contextmanager
    def _caught_up(self) -> Iterator[CodedExchange]:
        """For a caller that needs the outcome: nothing is put off any more.

        Raises:
            Exception: what had been put off has failed, here or there.
        """
        with self._lock:
            self._catch_up()
            if self._fault is not None:
                raise self._fault
            yield self._coded

    def _catch_up(self) -> None:
        """Does what was put off, in order; under the lock."""
        while self._to_do:
            self._attempt(self._to_do.popleft())

    def _attempt(self, job: Callable[[], None]) -> None:
        if self._fault is None:
            try:
                job()
            except Exception as error:
                self._fault = error
        if self._fault is not None:
            self._message = _Message.ENDED

    def _send(self) -> None:
        self._began_s, self._follow = time.monotonic(), None
        self._message = _Message.SENT
        self._coded.start()

    @torch.no_grad()
    def _look(self) -> None:
        """Decodes the sum if it has come, and what follows; under the lock."""
        if self._message is _Message.SENT and self._coded.poll():
            if not self._coded.has_arrived:
                self._message = _Message.ENDED
            elif self._sums:
                self._decode()
            else:
                self._message = _Message.DECODED
            self._taken_s = time.monotonic() - self._began_s
        if self._message is _Message.DECODED and self._follow is not None:
            work, is_adopted = self._follow
            if is_adopted():
                self._follow = None
                self._coded.commit()
                work(self._coded.sum_into)
                self._message = _Message.MADE

    def _decode(self) -> None:
        summed = self.result(self._side)
        self._coded.sum_into(0, summed.numel(), summed)
        self._message = _Message.DECODED

    @torch.no_grad()
    def decoded(self) -> torch.Tensor:
        """After :meth:`wait`: the sum, to be adopted or not."""
        is_decoded = bool(self._sums) and self._message is _Message.DECODED
        if self._turn is not _Turn.NONE and not is_decoded:
            with self._caught_up():
                self._decode()
        return self.result(self._side)

    def _collected(self) -> torch.Tensor:
        summed = self.decoded()
        self.release()
        return summed
