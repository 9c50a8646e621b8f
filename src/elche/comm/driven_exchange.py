"""An encoded sum that a second thread drives while this one trains.

A :class:`DrivenExchange` is a :class:`CodedExchange` whose work is done elsewhere: the
training thread fills the contribution, says :meth:`DrivenExchange.begin`, and later
finds the sum decoded; encoding, sending, decoding and keeping what was left out happen
on the group's `CodecThread`.

What is to be done stands in a queue, and whoever holds the lock does it, in order. So a
caller that needs the outcome (:meth:`DrivenExchange.wait`, a state, a commit) catches
up by itself and depends on no thread, and what fails there is raised there: only the
training thread asks the control channel for reasons.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, final

import torch

from elche.comm.codec_thread import Driven
from elche.comm.coded_exchange import CodedExchange
from elche.comm.residual_exchange import ResidualExchange
from elche.errors import ProtocolError

LOOKS = 16
"""So often it is looked for a sum in the time that it takes; each look costs 0.1 ms."""
LEAST_PAUSE_S = 1e-3
MOST_PAUSE_S = 0.02


class Driver(Protocol):
    """Calls :meth:`Driven.drive` soon, on another thread."""

    def serve(self, driven: Driven) -> None:
        """Something is to be done for it; does not wait."""


@final
class DrivenExchange(ResidualExchange):
    """An encoded exchange of two sides, driven beside the training thread.

    The sum of a side is written to the other one's contribution, whose message was
    taken before this one was begun: it costs no memory. So a caller fills a side after
    it has taken the other one's sum, and sides take turns: what has been taken is read
    a while longer, for what was left out of it.

    Args:
        coded: what is driven; nobody else uses it.
        driver: calls :meth:`drive`.

    Raises:
        ProtocolError: it has not two sides.
    """

    keeps_contribution = True

    def __init__(self, coded: CodedExchange, driver: Driver) -> None:
        if coded.sides != 2:
            raise ProtocolError(
                f"expected an exchange of two sides, got one of {coded.sides}"
            )
        super().__init__(coded.sides)
        self._coded = coded
        self._driver = driver
        self._lock = threading.Lock()
        # Under the lock, or a deque's own: appended to without it.
        self._to_do: deque[Callable[[], None]] = deque()
        self._awaits = self._is_retired = False
        self._began_s = self._taken_s = 0.0
        # Of the training thread, which is told of the last three by the other one.
        self._side = 0
        self._taken_side = -1
        self._is_open = False
        self._is_decoded = self._is_over = False
        self._fault: Exception | None = None

    @property
    def sent_bytes(self) -> int:
        """See :attr:`ResidualExchange.sent_bytes`."""
        return self._coded.sent_bytes

    @property
    def remote_bytes(self) -> int:
        """See :attr:`ResidualExchange.remote_bytes`."""
        return self._coded.remote_bytes

    @property
    def extra_bytes(self) -> int:
        """See :attr:`ResidualExchange.extra_bytes`."""
        return self._coded.extra_bytes

    def contribution(self, side: int) -> torch.Tensor:
        """See :meth:`Exchange.contribution`."""
        return self._coded.contribution(side)

    def result(self, side: int) -> torch.Tensor:
        """See :meth:`Exchange.result`: the other side's contribution."""
        return self._coded.contribution(1 - side)

    def begin(self, side: int) -> None:
        """The contribution is complete; what fails is raised by :meth:`wait`.

        Raises:
            ProtocolError: another message is under way, the exchange is broken, or it
                is not this side's turn.
        """
        if self._fault is not None:
            raise self._fault
        if self._is_open:
            raise self._coded.untaken("begin()")
        if side == self._taken_side:
            raise ProtocolError(
                f"begin() came for side {side}, whose sum was the last one that was "
                "taken; expected the other side"
            )
        self._side = side
        self._is_decoded = self._is_over = False
        self._to_do.append(partial(self._send, side))
        self._is_open = True
        self._driver.serve(self)

    def drive(self) -> float | None:
        """See :meth:`Driven.drive`; what fails is raised by :meth:`wait`."""
        with self._lock:
            if self._is_retired:
                return None
            self._catch_up()
            self._attempt(self._look)
            if self._fault is not None:
                self._awaits, self._is_over = False, True
            if not self._awaits:
                return None
        expected_s = max(self._taken_s, time.monotonic() - self._began_s)
        return min(max(expected_s / LOOKS, LEAST_PAUSE_S), MOST_PAUSE_S)

    def advance(self) -> None:
        """Nothing: that is the other thread's."""

    def poll(self) -> bool:
        """See :meth:`Exchange.poll`; that a rank has died is seen by :meth:`wait`."""
        return not self._is_open or self._is_over

    def wait(self, what: str) -> None:
        """See :meth:`Exchange.wait`."""
        if self._is_decoded:
            return
        with self._caught_up() as coded:
            self._awaits, self._is_over = False, True
            coded.wait(what)

    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See :meth:`Exchange.sum_into`."""
        if self._is_decoded:
            out.copy_(self.result(self._side)[start:stop])
            return
        with self._caught_up() as coded:
            coded.sum_into(start, stop, out)

    def release(self) -> None:
        """After the last :meth:`sum_into`: the sum is adopted, see :meth:`commit`."""
        if self._is_open and self._coded.has_arrived:
            self._is_open, self._taken_side = False, self._side
            self._to_do.append(self._coded.release)
            self._driver.serve(self)

    def commit(self) -> None:
        """See :meth:`ResidualExchange.commit`."""
        with self._caught_up() as coded:
            coded.commit()
            self._is_open = not coded.is_idle

    def rollback(self) -> None:
        """See :meth:`ResidualExchange.rollback`."""
        with self._caught_up() as coded:
            coded.rollback()
            self._awaits = self._is_decoded = False
            self._is_over = True
            self._is_open = not coded.is_idle

    def flush(self, what: str) -> None:
        """See :meth:`ResidualExchange.flush`."""
        with self._caught_up() as coded:
            coded.flush(what)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ResidualExchange.state_dict`."""
        with self._caught_up() as coded:
            return coded.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`ResidualExchange.load_state_dict`."""
        with self._caught_up() as coded:
            coded.load_state_dict(state)

    def retire(self) -> None:
        """See :meth:`ResidualExchange.retire`."""
        with self._lock:
            self._is_retired = True

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

    def _send(self, side: int) -> None:
        self._began_s = time.monotonic()
        self._awaits = True
        self._coded.start(side)

    @torch.no_grad()
    def _look(self) -> None:
        """Decodes the sum if it has come; under the lock."""
        if not self._awaits or not self._coded.poll():
            return
        if self._coded.has_arrived:
            summed = self.result(self._side)
            self._coded.sum_into(0, summed.numel(), summed)
            self._is_decoded = True
        self._taken_s = time.monotonic() - self._began_s
        self._awaits, self._is_over = False, True

    @torch.no_grad()
    def _collected(self) -> torch.Tensor:
        summed = self.result(self._side)
        if self._is_open and not self._is_decoded:
            self.sum_into(0, summed.numel(), summed)
            self._is_decoded = True
        self.release()
        return summed
