"""A sum over all ranks of messages that travel encoded, with error feedback.

Each rank owns a part of the sum. A message takes two hops::

    contribution ──part of each other rank, encoded──▶ its owner sums, encodes
    sum          ◀──part of each owner, encoded──────── and sends to all

That is 2 (W − 1) / W encoded messages per rank, the least for a sum over W ranks. Sums
are formed in float32 in the order of the ranks. Every rank decodes the bytes that
travelled, its own included, so all ranks get the same bits.

*Error feedback* (Seide et al., Interspeech 2014; Karimireddy et al., arXiv:1901.09847):
the rounding error of a message is added to the next one. A rank holds it as one
residual: the error of the sum in the part that the rank owns, elsewhere the error of
its own messages. It is kept per unit of weight (of the mean weight in the owned part),
so that a light message does not carry a heavy one's error, and so that it keeps its
meaning in a group of other ranks (exact for equal weights).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import torch
from typing_extensions import override

from elche.comm.codec.codec import Codec
from elche.comm.codec.codec_message import CodedMessage, chunks_of, parts_of
from elche.comm.codec.codec_peers import Peers
from elche.comm.transport.exchange import Exchange
from elche.errors import CommunicationError, ElcheError, MismatchError, ProtocolError


class _Phase(Enum):
    """Progress of the one message.

    ::

        IDLE ──begin──> OFFERED ──all offers──> SUMMED ──all sums──> ARRIVED
         ^                 │                      │                    │
         │                 └─an error, rollback───┴──> BROKEN (final)  │
         └──────────────────release, commit, rollback──────────────────┘

    ``commit`` before the sum arrived keeps the message's residual and its phase.
    """

    IDLE = "nothing is under way"
    OFFERED = "a message is under way"
    SUMMED = "a message is under way, its own part summed"
    ARRIVED = "a sum is there"
    BROKEN = "a message failed or was given up"


_UNDER_WAY = (_Phase.OFFERED, _Phase.SUMMED)


@dataclass(slots=True)
class _Transfer:
    """A message between this rank and another one; `peer` is its number in the run."""

    peer: int
    message: CodedMessage
    work: Any


@final
class CodedExchange(Exchange):
    """A message of float32 elements and their weight, summed in encoded form.

    The last element of a message is its weight: it travels as float32, as do some
    elements before it if asked for. A rank of weight 0 sends zeros, whatever it holds,
    and keeps its residual; if all weigh nothing, the sum is zero. A contribution that
    is not finite (or reaches 2^127) makes the whole sum NaN on every rank and leaves
    residuals alone.

    Made by `codec_opening`. It advances whenever an exchange of its group is polled or
    waited for. An exchange that broke serves no more, and neither does its group; its
    :attr:`residual` continues in another one.

    Args:
        peers: the other ranks.
        codec: encoding of the messages.
        numel: elements of a message, its weight and the exact ones included.
        tag: first of two tags of its transfers, the same on all ranks.
        exact: elements before the weight that travel as float32.
    """

    keeps_contribution = True

    def __init__(
        self, peers: Peers, codec: Codec, numel: int, tag: int = 0, exact: int = 0
    ) -> None:
        super().__init__(1)
        rank, world_size = peers.rank, peers.world_size
        self._peers = peers
        self._tag = tag
        self._numel = numel - 1 - exact
        self._contribution = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._result: torch.Tensor | None = None
        self._residual = torch.zeros_like(self._contribution[: self._numel])
        self._next_residual = torch.zeros_like(self._residual)
        parts = parts_of(self._numel, world_size, codec.block)
        self._own = parts[rank]
        # Each begins with the next rank, or all would send to the first one first.
        others = [(rank + step) % world_size for step in range(1, world_size)]
        self._offers = {r: CodedMessage(codec, parts[r], exact) for r in others}
        self._gathered = {r: CodedMessage(codec, self._own, exact) for r in others}
        self._sums = [CodedMessage(codec, part, exact) for part in parts]
        self._exact = torch.zeros(exact, dtype=torch.float32, device="cpu")
        self._phase = _Phase.IDLE
        self._arrivals: list[_Transfer] = []
        self._sum_arrivals: list[_Transfer] = []
        self._offered: list[_Transfer] = []
        self._sum_sends: list[_Transfer] = []
        self._number = 0
        self._weight = self._total = 0.0
        self._has_summed = self._has_sum = self._is_kept = False
        self._error: Exception | None = None
        self._is_bare = False

    @property
    def residual(self) -> torch.Tensor:
        """Residual as last committed; flat, float32, not a copy."""
        return self._residual

    def load_residual(self, residual: torch.Tensor) -> None:
        """Continues from another exchange's residual, of any codec and world size.

        Raises:
            MismatchError: it is the residual of other elements.
            ProtocolError: a message is under way.
        """
        self._check_idle("load_residual()")
        if residual.shape != self._residual.shape:
            raise MismatchError(
                f"expected a residual of {self._numel} elements, got "
                f"{list(residual.shape)}; it belongs to other parameters"
            )
        self._residual.copy_(residual)

    @property
    def extra_bytes(self) -> int:
        """Host memory beside contribution and result: residuals and messages."""
        messages = [*self._offers.values(), *self._gathered.values(), *self._sums]
        held = sum(message.memory.numel() for message in messages)
        return held + 8 * self._numel + 4 * self._exact.numel()

    @property
    def is_finite(self) -> bool:
        """True if all contributions to the last sum were finite."""
        return math.isfinite(self._total)

    @override
    def contribution(self, side: int) -> torch.Tensor:
        return self._contribution

    @override
    def result(self, side: int) -> torch.Tensor:
        if self._result is None:
            self._result = torch.zeros_like(self._contribution)
        return self._result

    @torch.no_grad()
    def begin(self, side: int) -> None:
        """Encodes the contribution and begins to send it; :meth:`wait` raises failures.

        Raises:
            ProtocolError: another message is under way, the exchange is broken, or the
                weight is negative.
        """
        self._check_idle("begin()")
        self._weight = float(self._contribution[-1])
        if self._weight < 0.0:
            raise ProtocolError(
                f"expected a weight that is not negative, got {self._weight}"
            )
        self._has_summed = self._has_sum = self._is_kept = False
        self._number += 1
        self._phase = _Phase.OFFERED
        self._peers.under_way.add(self)
        try:
            self._arrivals = [
                self._receive(rank, message, 0)
                for rank, message in self._gathered.items()
            ]
            self._sum_arrivals = [
                self._receive(rank, self._sums[rank], 1) for rank in self._gathered
            ]
            for rank, message in self._offers.items():
                self._encode_offer(message)
                self._offered.append(self._send(rank, message, 0))
        except ElcheError as error:
            self._break(error)

    def advance(self) -> None:
        """Continues without waiting; :meth:`wait` raises failures."""
        self.poll()

    @override
    def poll(self) -> bool:
        """Advances all exchanges of the group; see :meth:`Exchange.poll`.

        Only :meth:`wait` notices the death of a rank.
        """
        for exchange in tuple(self._peers.under_way):
            exchange._advance()
        return self._phase not in _UNDER_WAY

    @override
    def wait(self, what: str) -> None:
        while self._phase in _UNDER_WAY:
            try:
                self._peers.poll_until(self.poll, what)
                if self._phase in _UNDER_WAY:
                    self._step(what)
            except ElcheError as error:
                self._break(error)
        if self._error is not None:
            raise self._reason()

    @property
    @override
    def has_sum(self) -> bool:
        self.poll()
        return self._phase is _Phase.ARRIVED

    @torch.no_grad()
    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        if not self._has_sum:
            raise ProtocolError(f"sum_into() came when {self._phase.value}")
        if stop > self._numel:
            at = max(start, self._numel)
            tail = torch.cat([self._exact, out.new_tensor([self._total])])
            out[at - start :] = tail[at - self._numel : stop - self._numel]
        if not self._total > 0.0:
            out[: max(0, self._numel - start)].fill_(0.0 * self._total)
            return
        for message in self._sums:
            part = message.part
            for chunk in chunks_of(range(max(start, part.start), min(stop, part.stop))):
                begin = chunk.start - start
                message.read(chunk, out[begin : begin + len(chunk)])

    def release(self) -> None:
        """After the last :meth:`sum_into`: the sum is adopted, see :meth:`commit`."""
        if self._phase is _Phase.ARRIVED:
            self.commit()

    def commit(self) -> None:
        """Every rank adopts the sum: the residual becomes that of this message.

        Also on a rank that adopts it from another one. A second call for the same
        message does nothing.

        Raises:
            ProtocolError: nothing was begun, or no rank can have the sum because this
                one has not sent its part of it.
        """
        if self._is_kept:
            return
        if self._phase is _Phase.IDLE:
            raise ProtocolError("commit() came when nothing was begun")
        if not self._has_summed:
            raise ProtocolError(
                "no rank can have the sum: this one has not sent its part of it; "
                "expected the reduction to be done again"
            )
        if not math.isnan(self._total):
            kept = self._residual, self._next_residual
            self._next_residual, self._residual = kept
        self._is_kept = True
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.IDLE

    def rollback(self) -> None:
        """No rank adopts the message: the residual stays what it was before.

        A sum that arrived is forgotten. A message under way breaks the exchange,
        because others may be sending to it.
        """
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.IDLE
        elif self._phase in _UNDER_WAY:
            self._break(
                CommunicationError(
                    "a message was given up; expected a new exchange in a new group"
                )
            )
        self._has_sum = False

    def flush(self, what: str) -> None:
        """Waits until all that was sent has left.

        Before the group is closed, or another exchange takes this one's place in it.

        Raises:
            CommunicationError: it failed.
        """
        try:
            self._settle(self._offered, what)
            self._settle(self._sum_sends, what)
        except CommunicationError as error:
            raise self._peers.explained(error) from error

    @torch.no_grad()
    def _advance(self) -> None:
        """Continues as far as messages have arrived."""
        try:
            while self._phase in _UNDER_WAY and self._is_ready:
                self._step("summing in encoded form")
        except ElcheError as error:
            self._break(error)

    @property
    def _awaited(self) -> list[_Transfer]:
        is_offered = self._phase is _Phase.OFFERED
        return self._arrivals if is_offered else self._sum_arrivals

    @property
    def _is_ready(self) -> bool:
        """True if :meth:`_step` would not wait."""
        return all(each.message.number != 0 for each in self._awaited)

    @torch.no_grad()
    def _step(self, what: str) -> None:
        """Waits for the messages of one hop, and uses them."""
        self._collect(self._awaited, what)
        if self._phase is _Phase.OFFERED:
            self._sum_up()
            self._phase = _Phase.SUMMED
            return
        self._settle(self._offered, what)  # owners that sent sums had the offers
        if not all(math.isfinite(message.weight) for message in self._sums):
            self._total = math.nan
        self._phase, self._has_sum = _Phase.ARRIVED, True
        self._peers.under_way.discard(self)

    def _encode_offer(self, message: CodedMessage) -> None:
        """Encodes an owner's part; NaN as its weight says that it is not finite."""
        weight, is_finite = self._weight, math.isfinite(self._weight)
        for chunk in chunks_of(message.part):
            at = slice(chunk.start, chunk.stop)
            if weight == 0.0:  # nothing at all of values that weigh nothing
                message.write(chunk, torch.zeros_like(self._residual[at]))
                self._next_residual[at] = self._residual[at]
                continue
            values = torch.add(self._contribution[at], self._residual[at], alpha=weight)
            is_finite &= self._encode(message, chunk, values, weight)
        message.exact.copy_(self._own_exact)
        message.seal(weight if is_finite else math.nan, self._number)

    def _sum_up(self) -> None:
        """Forms the sum of this rank's part, and begins to send it."""
        # All ranks have begun this message, so all had this rank's last sum.
        self._settle(self._sum_sends, "sending an earlier sum")
        world_size, mine = self._peers.world_size, self._peers.rank
        gathered: list[CodedMessage | None]
        gathered = [self._gathered.get(rank) for rank in range(world_size)]
        weights = [self._weight if m is None else m.weight for m in gathered]
        self._total = sum(weights)
        exacts = [self._own_exact if m is None else m.exact for m in gathered]
        torch.sum(torch.stack(exacts), dim=0, out=self._exact)
        message, is_finite = self._sums[mine], math.isfinite(self._total)
        for chunk in chunks_of(self._own):
            at = slice(chunk.start, chunk.stop)
            if not self._total > 0.0:
                self._next_residual[at] = self._residual[at]
                continue
            mean = self._total / world_size
            total = self._residual[at] * mean
            for weight, each in zip(weights, gathered, strict=True):
                if weight == 0.0:
                    continue
                if each is None:
                    total.add_(self._contribution[at])
                    continue
                decoded = self._next_residual[at]  # overwritten below
                each.read(chunk, decoded)
                total.add_(decoded)
            is_finite &= self._encode(message, chunk, total, mean)
        self._total = self._total if is_finite else math.nan
        message.exact.copy_(self._exact)
        message.seal(self._total, self._number)
        self._has_summed = True
        self._sum_sends = [self._send(rank, message, 1) for rank in self._gathered]

    def _encode(
        self, message: CodedMessage, chunk: range, values: torch.Tensor, unit: float
    ) -> bool:
        """Encodes values, and keeps the error per unit; True if they are finite."""
        is_finite = message.write(chunk, values)
        error = self._next_residual[chunk.start : chunk.stop]
        message.read(chunk, error)
        torch.sub(values, error, out=error)
        if unit != 1.0:
            error.div_(unit)
        return is_finite

    @property
    def _own_exact(self) -> torch.Tensor:
        return self._contribution[self._numel : -1]

    def _send(self, to: int, message: CodedMessage, hop: int) -> _Transfer:
        work = self._peers.send_async(message.memory, to, self._tag + hop)
        return _Transfer(self._peers.ranks[to], message, work)

    def _receive(self, source: int, message: CodedMessage, hop: int) -> _Transfer:
        message.clear()
        work = self._peers.receive_async(message.memory, source, self._tag + hop)
        return _Transfer(self._peers.ranks[source], message, work)

    def _collect(self, arrivals: list[_Transfer], what: str) -> None:
        for each in arrivals:
            self._peers.wait(each.work, f"{what}: the message of rank {each.peer}")
            if each.message.number != self._number:
                raise ProtocolError(
                    f"{what}: expected message {self._number} of rank {each.peer}, "
                    f"got {each.message.number}"
                )
        arrivals.clear()

    def _settle(self, sends: list[_Transfer], what: str) -> None:
        for each in sends:
            self._peers.wait(each.work, f"{what} to rank {each.peer}")
        sends.clear()

    def _check_idle(self, call: str) -> None:
        if self._phase is not _Phase.IDLE:
            raise ProtocolError(
                f"{call} came when {self._phase.value}; expected the last sum to have "
                "been taken"
            )

    def _break(self, error: ElcheError) -> None:
        self._phase, self._error = _Phase.BROKEN, error
        self._is_bare = isinstance(error, CommunicationError)
        self._peers.under_way.discard(self)

    def _reason(self) -> Exception:
        """The error that broke the exchange; the group is asked why once."""
        error = self._error
        assert error is not None
        if self._is_bare and isinstance(error, CommunicationError):
            why = self._error = self._peers.explained(error)
            why.__cause__, self._is_bare = error, False
            return why
        return error

    def _collected(self) -> torch.Tensor:
        result = self.result(0)
        self.sum_into(0, result.numel(), result)
        return result
