"""Routes of an encoded all-reduce.

Two ranks send each other all they have. More ranks sum by parts: each sends every other
one that one's part, sums the part that it owns itself, and sends the sum to all.
That is 2 (W − 1) / W encoded messages per rank, the least for a sum over W ranks, where
sending everything to all takes W − 1; for two ranks both are one message, and a
sum that is not encoded a second time has half the error.

Sums are formed in float32 in the order of the ranks. What a rank decodes is what
travelled, its own messages included, so all ranks get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final

import torch
from typing_extensions import override

from elche.comm.codec.codec import Codec
from elche.comm.codec.codec_message import CodedMessage, chunks_of, parts_of
from elche.comm.codec.codec_peers import Peers
from elche.comm.codec.codec_route import Route, Transfer

PIECES = 4
"""Two ranks' messages travel in so many pieces: the first leaves while the others are
still encoded."""
LEAST_PIECE = 65_536
"""Elements of a piece; smaller messages are not worth the calls."""


@final
class DirectRoute(Route):
    """All ranks send everything to all, in pieces; for two ranks."""

    def __init__(
        self, peers: Peers, codec: Codec, numel: int, tag: int, exact: int = 0
    ) -> None:
        super().__init__(peers, codec, numel, tag, exact)
        self._parts = pieces_of(codec, numel)
        self._outgoing = [self._pieces(codec) for _ in range(2)]
        self._incoming = {rank: self._pieces(codec) for rank in self._others}
        self._messages: list[list[CodedMessage]] = []
        self._has_encoded = False

    def _pieces(self, codec: Codec) -> list[CodedMessage]:
        return [self._message(codec, part) for part in self._parts]

    @override
    def begin(self, values: torch.Tensor, residual: torch.Tensor) -> None:
        self._has_encoded = False
        turn = self._open(values)
        self._arrivals = [
            self._receive(rank, piece, kind)
            for rank, pieces in self._incoming.items()
            for kind, piece in enumerate(pieces)
        ]
        own = self._outgoing[turn]
        for kind, piece in enumerate(own):
            self._encode(piece, residual)
            sends = [self._send(rank, piece, kind) for rank in self._others]
            self._last_sends[turn] += sends
        self._has_encoded = True
        by_rank = {**self._incoming, self._peers.rank: own}
        self._messages = [by_rank[rank] for rank in sorted(by_rank)]

    @override
    def advance(self, what: str) -> None:
        self._collect(self._arrivals, what)
        # A piece that is not finite has NaN for its weight, and so the sum has.
        self.total = sum(pieces[0].weight for pieces in self._messages)
        self._sum_exact(pieces[0].exact for pieces in self._messages)
        if any(math.isnan(piece.weight) for each in self._messages for piece in each):
            self.total = math.nan

    @override
    def read(self, start: int, out: torch.Tensor) -> None:
        index = next(i for i, part in enumerate(self._parts) if start in part)
        weighing = [m[index] for m in self._messages if m[index].weight != 0.0]
        if not weighing:
            out.zero_()
            return
        weighing[0].read(start, out)
        for message in weighing[1:]:
            decoded = self._scratch[1, : out.numel()]
            message.read(start, decoded)
            out.add_(decoded)

    @override
    def parts(self) -> list[range]:
        return self._parts

    @property
    def _message_bytes(self) -> int:
        pieces = (*self._outgoing, *self._incoming.values())
        return _size_bytes(piece for each in pieces for piece in each)

    @property
    @override
    def has_encoded(self) -> bool:
        return self._has_encoded

    @override
    def keep_errors(self, residual: torch.Tensor) -> None:
        for piece in self._outgoing[self._number % 2]:
            self._keep_own_errors(piece, residual)


@final
class PartedRoute(Route):
    """Every rank sums the part that it owns; for three ranks and more."""

    def __init__(
        self, peers: Peers, codec: Codec, numel: int, tag: int, exact: int = 0
    ) -> None:
        super().__init__(peers, codec, numel, tag, exact)
        self._parts = parts_of(numel, peers.world_size, codec.block)
        self.own = self._parts[peers.rank]
        others, own = self._others, self.own
        self._offers = {r: self._message(codec, self._parts[r]) for r in others}
        self._gathered = {r: self._message(codec, own) for r in others}
        self._sums = [self._message(codec, own) for _ in range(2)]
        self._received = {r: self._message(codec, self._parts[r]) for r in others}
        self._left_over = torch.zeros(len(own), dtype=torch.float32, device="cpu")
        self._offered: list[Transfer] = []
        self._sum_arrivals: list[Transfer] = []
        self._turn = 0

    @override
    def begin(self, values: torch.Tensor, residual: torch.Tensor) -> None:
        self._turn = self._open(values)
        self._residual = residual
        self._arrivals = [self._receive(r, m, 0) for r, m in self._gathered.items()]
        self._sum_arrivals = [self._receive(r, m, 1) for r, m in self._received.items()]
        for rank, offer in self._offers.items():
            self._encode(offer, residual)
            self._offered.append(self._send(rank, offer, 0))

    @property
    @override
    def is_done(self) -> bool:
        return not self._sum_arrivals

    @override
    def is_ready(self) -> bool:
        return self._have_come(self._arrivals or self._sum_arrivals)

    @override
    def advance(self, what: str) -> None:
        if self._arrivals:
            self._collect(self._arrivals, what)
            self._sum_up()
            return
        self._collect(self._sum_arrivals, what)
        # Whoever sent its sum had this rank's offer.
        self._settle(self._offered, what)
        if not all(math.isfinite(m.weight) for m in self._received.values()):
            self.total = math.nan

    def _sum_up(self) -> None:
        """Forms the sum of this rank's part, and begins to send it."""
        weights = {rank: message.weight for rank, message in self._gathered.items()}
        weights[self._peers.rank] = self._weight
        self.total = sum(weights[rank] for rank in sorted(weights))
        gathered = (message.exact for message in self._gathered.values())
        self._sum_exact([self._own_exact, *gathered])
        message = self._sums[self._turn]
        is_finite = math.isfinite(self.total)
        if self.total > 0.0:
            for chunk in chunks_of(self.own):
                is_finite &= self._sum_chunk(chunk, weights, message)
        if not is_finite:
            self.total = math.nan
        message.seal(self.total, self._number)
        self._last_sends[self._turn] = [
            self._send(rank, message, 1) for rank in self._others
        ]

    def _sum_chunk(
        self, chunk: range, weights: dict[int, float], message: CodedMessage
    ) -> bool:
        """Sums and encodes a piece; this rank's own share of it never travelled."""
        part = slice(chunk.start, chunk.stop)
        total = self._scratch[0, : len(chunk)].zero_()
        decoded = self._scratch[1, : len(chunk)]
        for rank in sorted(weights):
            if weights[rank] == 0.0:
                continue
            if rank == self._peers.rank:
                total.add_(self._values[part])
            else:
                self._gathered[rank].read(chunk.start, decoded)
                total.add_(decoded)
        total.add_(self._residual[part], alpha=self.total)
        is_finite = message.write(chunk.start, total)
        message.read(chunk.start, decoded)
        begin = chunk.start - self.own.start
        left_over = self._left_over[begin : begin + len(chunk)]
        torch.sub(total, decoded, out=left_over).div_(self.total)
        return is_finite

    @override
    def read(self, start: int, out: torch.Tensor) -> None:
        if start in self.own:
            self._sums[self._turn].read(start, out)
            return
        for message in self._received.values():
            if start in message.part:
                message.read(start, out)

    @override
    def parts(self) -> list[range]:
        return self._parts

    @property
    def _message_bytes(self) -> int:
        by_rank = (self._offers, self._gathered, self._received)
        travelling = [each for some in by_rank for each in some.values()]
        left_over_bytes = 4 * self._left_over.numel()
        return _size_bytes([*travelling, *self._sums]) + left_over_bytes

    @property
    @override
    def has_encoded(self) -> bool:
        return not self._arrivals

    @override
    def keep_errors(self, residual: torch.Tensor) -> None:
        for offer in self._offers.values():
            self._keep_own_errors(offer, residual)
        if self.total > 0.0:
            residual[self.own.start : self.own.stop].copy_(self._left_over)


def _size_bytes(messages: Iterable[CodedMessage]) -> int:
    return sum(each.memory.numel() for each in messages)


def pieces_of(codec: Codec, numel: int) -> list[range]:
    """The parts in which two ranks send each other a message; one at least."""
    pieces = max(1, min(PIECES, numel // LEAST_PIECE))
    return parts_of(numel, pieces, codec.block)


def route_over(
    peers: Peers, codec: Codec, numel: int, tag: int, exact: int = 0
) -> Route:
    """The route that sends least between so many ranks."""
    kind = DirectRoute if peers.world_size == 2 else PartedRoute
    return kind(peers, codec, numel, tag, exact)


def sent_bytes(codec: Codec, numel: int, world_size: int, rank: int) -> int:
    """Exact bytes that a rank sends for one sum, without what the transport adds.

    Args:
        codec: of the messages.
        numel: elements of the sum, its weight not counted.
        world_size: ranks; at least 2.
        rank: the rank.
    """
    if world_size == 2:
        pieces = pieces_of(codec, numel)
        return sum(CodedMessage.size_bytes(codec, len(piece)) for piece in pieces)
    sizes = [
        CodedMessage.size_bytes(codec, len(part))
        for part in parts_of(numel, world_size, codec.block)
    ]
    own = sizes.pop(rank)
    return sum(sizes) + (world_size - 1) * own
