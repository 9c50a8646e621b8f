"""A sum over all ranks of messages that travel encoded, for slow links.

A :class:`CodedExchange` is an exchange like the others: contributions are kept, the
sum is out of place and the same to the bit on every rank. What differs is that the sum
is rounded, and that what the rounding took off is kept and sent later (*error
feedback*, see `codec_route` and `residual_exchange`).

Memory: a message, a residual, and what travels
(:attr:`CodedExchange.extra_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, final

import torch
from typing_extensions import override

from elche.comm.codec.codec import Codec
from elche.comm.codec.codec_message import chunks_of
from elche.comm.codec.codec_peers import Peers
from elche.comm.codec.codec_routes import route_over
from elche.comm.codec.host_routes import host_route
from elche.comm.codec.residual_exchange import ResidualExchange
from elche.comm.transport.host_exchange import spans_hosts
from elche.errors import CommunicationError, ElcheError, MismatchError, ProtocolError


class _Phase(Enum):
    """Where the one message is.

    ::

        IDLE ──start──> BEGUN ──poll, wait: the sum is complete──> ARRIVED
         ^                │                                          │
         │                └──an error, rollback──> BROKEN (final)    │
         └──────────────────release, commit, rollback────────────────┘

    ``commit`` of a sum that has not arrived keeps what encoding left out, and the
    message stays BEGUN or BROKEN.
    """

    IDLE = "nothing is under way"
    BEGUN = "a message is under way"
    ARRIVED = "a sum is there"
    BROKEN = "a message failed or was given up"


def residual_of_a_rank(state: dict[str, Any]) -> torch.Tensor:
    """The residual of a :meth:`CodedExchange.state_dict` as part of what a rank sends.

    From units of what was sent or summed; exact for equal weights.
    """
    scale = torch.full_like(state["residual"], float(state["ranks"]))
    begin, end = state["own"]
    scale[begin:end] = float(state["world_size"])
    return scale.mul_(state["residual"])


@final
class CodedExchange(ResidualExchange):
    """A message of float32 elements and their weight, summed in encoded form.

    The last element of a message is its weight: it travels as it is, and its sum is
    exact, as are those of some elements before it, if that is asked for. A rank of
    weight 0 sends zeros, whatever else it holds, and keeps its residual; if all weigh
    nothing, the sum is zero. A contribution that is not finite (or reaches 2^127) makes
    the whole sum NaN on every rank and leaves residuals alone.

    Made by `codec_opening`. One message is under way at a time. An exchange
    that broke serves no more, and neither does its group; its :meth:`state_dict` goes
    on in another one.

    Args:
        peers: the other ranks.
        codec: of the messages.
        numel: elements of a message, its weight and the exact ones included.
        tag: of its transfers; four belong to it, the same on all ranks.
        hosts: names of the ranks' hosts, if they are known; ranks that share one are
            summed there first.
        exact: elements before the weight that travel as they are.
    """

    keeps_contribution = True

    def __init__(
        self,
        peers: Peers,
        codec: Codec,
        numel: int,
        tag: int = 0,
        hosts: Sequence[str] = (),
        exact: int = 0,
    ) -> None:
        super().__init__(1)
        self._peers = peers
        self._codec = codec
        self._values = numel - 1 - exact
        self._contribution = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._result: torch.Tensor | None = None
        self._residual = torch.zeros_like(self._contribution[: self._values])
        self._route = (
            host_route(peers, codec, self._values, tag, hosts, exact)
            if spans_hosts(hosts)
            else route_over(peers, codec, self._values, tag, exact)
        )
        self._scratch = torch.empty(codec.block, dtype=torch.float32, device="cpu")
        self._phase = _Phase.IDLE
        self._has_sum = self._is_kept = False
        self._error: Exception | None = None
        self._is_bare = False

    @property
    @override
    def sent_bytes(self) -> int:
        return self._route.sent_bytes

    @property
    @override
    def remote_bytes(self) -> int:
        return self._route.remote_bytes

    @property
    @override
    def extra_bytes(self) -> int:
        own = self._residual.numel() + self._scratch.numel()
        return 4 * own + self._route.host_bytes

    @override
    def contribution(self, side: int) -> torch.Tensor:
        return self._contribution

    @override
    def result(self, side: int) -> torch.Tensor:
        if self._result is None:
            self._result = torch.zeros_like(self._contribution)
        return self._result

    def begin(self, side: int) -> None:
        """Encodes the contribution and begins to send it.

        Raises:
            ProtocolError: another message is under way, or the exchange is broken.
            CommunicationError: the group is broken.
        """
        self.start()
        if self._error is not None:
            raise self._reason()

    @torch.no_grad()
    def start(self) -> None:
        """As :meth:`begin`; but what fails is raised by :meth:`wait`.

        Raises:
            ProtocolError: another message is under way, or the exchange is broken.
        """
        self.check_idle("begin()")
        self._has_sum = self._is_kept = False
        self._phase = _Phase.BEGUN
        try:
            self._route.begin(self._contribution, self._residual)
        except ElcheError as error:
            self._break(error)

    def check_idle(self, call: str) -> None:
        """Refuses a call for which the last sum must have been taken.

        Raises:
            ProtocolError: a message is under way, or the exchange is broken.
        """
        if self._phase is not _Phase.IDLE:
            raise self.untaken(call)

    def untaken(self, call: str) -> ProtocolError:
        """The error of a call that came before the last sum had been taken.

        What waits to be begun elsewhere is under way too.
        """
        is_queued = self._phase is _Phase.IDLE
        phase = _Phase.BEGUN if is_queued else self._phase
        return ProtocolError(
            f"{call} came when {phase.value}; expected the last sum to have been taken"
        )

    @property
    def is_idle(self) -> bool:
        """Whether a message may begin."""
        return self._phase is _Phase.IDLE

    @property
    def has_arrived(self) -> bool:
        """Whether a sum is there that has not been taken."""
        return self._phase is _Phase.ARRIVED

    @property
    @override
    def has_sum(self) -> bool:
        self.poll()
        return self.has_arrived

    def advance(self) -> None:
        """Goes on without waiting; what fails is raised by :meth:`wait`."""
        self.poll()

    @torch.no_grad()
    def poll(self) -> bool:
        """Does what can be done without waiting; see :meth:`Exchange.poll`.

        A rank that has died is not noticed here, only by :meth:`wait`.
        """
        try:
            while self._phase is _Phase.BEGUN and self._route.is_ready():
                self._step("summing in encoded form")
        except ElcheError as error:
            self._break(error)
        return self._phase is not _Phase.BEGUN

    @torch.no_grad()
    @override
    def wait(self, what: str) -> None:
        try:
            while self._phase is _Phase.BEGUN:
                self._peers.look_out(self._route.is_ready, what)
                self._step(what)
        except ElcheError as error:
            self._break(error)
        if self._error is not None:
            raise self._reason()

    @torch.no_grad()
    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        if not self._has_sum:
            raise ProtocolError(f"sum_into() came when {self._phase.value}")
        if stop > self._values:
            at = max(start, self._values)
            tail = torch.cat([self._route.exact, out.new_tensor([self._route.total])])
            out[at - start :] = tail[at - self._values : stop - self._values]
        if start >= self._values:
            return
        if not self._route.total > 0.0:
            out[: self._values - start].fill_(0.0 * self._route.total)
            return
        for part in self._route.parts():
            wanted = range(max(start, part.start), min(stop, part.stop))
            if wanted:
                self._read(wanted, part, out[wanted.start - start :])

    def release(self) -> None:
        """After the last :meth:`sum_into`: the sum is adopted, see :meth:`commit`."""
        if self._phase is _Phase.ARRIVED:
            self.commit()

    @torch.no_grad()
    @override
    def commit(self) -> None:
        if self._phase is _Phase.IDLE:
            if self._is_kept:
                return
            raise ProtocolError("commit() came when nothing was begun")
        if not self._route.has_encoded:
            raise ProtocolError(
                "no rank can have the sum: this one has not sent its part of it; "
                "expected the reduction to be done again"
            )
        if not self._is_kept and not math.isnan(self._route.total):
            self._route.keep_errors(self._residual)
        self._is_kept = True
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.IDLE

    @override
    def rollback(self) -> None:
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.IDLE
        elif self._phase is _Phase.BEGUN:
            self._phase = _Phase.BROKEN
            self._error = CommunicationError(
                "a message was given up; expected a new exchange in a new group"
            )
        self._has_sum = False

    @override
    def flush(self, what: str) -> None:
        try:
            self._route.flush(what)
        except CommunicationError as error:
            raise self._peers.explained(error) from error

    @override
    def state_dict(self) -> dict[str, Any]:
        own = self._route.own
        return {
            "residual": self._residual.clone(),
            "own": (own.start, own.stop),
            "world_size": self._peers.world_size,
            "ranks": self._route.ranks,
        }

    @torch.no_grad()
    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_idle("load_state_dict()")
        residual = state["residual"]
        if residual.shape != self._residual.shape:
            raise MismatchError(
                f"expected a residual of {self._values} elements, got "
                f"{list(residual.shape)}; it belongs to other parameters"
            )
        self._residual.copy_(residual)
        own, ranks = self._route.own, self._route.ranks
        now = (own.start, own.stop, self._peers.world_size, ranks)
        begin, end = state["own"]
        if (begin, end, state["world_size"], state["ranks"]) != now:
            self._residual.copy_(residual_of_a_rank(state))
            scale = torch.full_like(self._residual, 1.0 / ranks)
            scale[own.start : own.stop] = 1.0 / self._peers.world_size
            self._residual.mul_(scale)

    def _step(self, what: str) -> None:
        self._route.advance(what)
        if self._route.is_done:
            self._phase, self._has_sum = _Phase.ARRIVED, True

    def _break(self, error: ElcheError) -> None:
        self._phase, self._error = _Phase.BROKEN, error
        self._is_bare = isinstance(error, CommunicationError)

    def _reason(self) -> Exception:
        """What broke it; whoever is to hear of it asks the group why, once."""
        error = self._error
        assert error is not None
        if self._is_bare and isinstance(error, CommunicationError):
            why = self._error = self._peers.explained(error)
            why.__cause__, self._is_bare = error, False
            return why
        return error

    def _collected(self) -> torch.Tensor:
        result = self.result(0)
        if self._has_sum:
            self.sum_into(0, result.numel(), result)
            self.release()
        return result

    def _read(self, wanted: range, part: range, out: torch.Tensor) -> None:
        """Writes elements of one part; a block that is cut, by way of scratch."""
        block = self._codec.block
        at, end = wanted.start, wanted.stop
        while at < end:
            first = at - at % block
            whole = end if end == part.stop else end - end % block
            if first == at and at < whole:
                for chunk in chunks_of(range(at, whole)):
                    begin = chunk.start - wanted.start
                    self._route.read(chunk.start, out[begin : begin + len(chunk)])
                at = whole
                continue
            size = min(block, part.stop - first)
            self._route.read(first, self._scratch[:size])
            stop = min(end, first + size)
            begin = at - wanted.start
            out[begin : begin + stop - at].copy_(
                self._scratch[at - first : stop - first]
            )
            at = stop
