"""Base of encoded reductions: encoding, transfers, and error feedback.

*Error feedback* (Seide et al., Interspeech 2014; Karimireddy et al., arXiv:1901.09847):
what encoding took off a message is added to the next one. A rank holds it in one
residual: for the part that it owns that of the sum, elsewhere that of what it sent. It
is kept per unit of weight, so that a message of little weight does not blow up the
error of a heavy one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from elche.comm.codec.codec import CHUNK_ELEMENTS, Codec
from elche.comm.codec.codec_message import CodedMessage, chunks_of
from elche.comm.codec.codec_peers import Peers
from elche.errors import ProtocolError


@dataclass(slots=True)
class Transfer:
    """A message under way.

    Attributes:
        peer: the rank at the other end, as the whole group counts it.
        message: what travels.
        work: what is waited for.
    """

    peer: int
    message: CodedMessage
    work: Any


class Route(ABC):
    """One rank's way to the sum; serves one message after the other.

    Args:
        peers: the other ranks.
        codec: of all messages.
        numel: elements of a message.
        tag: of the first of four kinds of messages; the same on all ranks.
        exact: elements between them and their weight that travel as they are.

    Attributes:
        exact: the sums of those, when the sum is there.
        own: the elements that this rank owns.
        ranks: whose contributions this rank's messages carry: its own, or its host's.
        total: what all ranks weigh, when the sum is there; NaN if it is not finite.
    """

    ranks = 1

    def __init__(
        self, peers: Peers, codec: Codec, numel: int, tag: int, exact: int = 0
    ) -> None:
        self._peers = peers
        self._codec = codec
        self._numel = numel
        self._tag = tag
        self._number = 0
        self._weight = 0.0
        # Each begins with the next rank, or all would send to the first one first.
        size = peers.world_size
        self._others = [(peers.rank + step) % size for step in range(1, size)]
        self._last_sends: list[list[Transfer]] = [[], []]
        self._arrivals: list[Transfer] = []  # that the sum waits for
        chunk = min(CHUNK_ELEMENTS, -(-numel // codec.block) * codec.block)
        self._scratch = torch.empty(2, chunk, dtype=torch.float32, device="cpu")
        self.exact = torch.zeros(exact, dtype=torch.float32, device="cpu")
        self.own = range(0)
        self.total = 0.0
        self._sent_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Sent so far."""
        return self._sent_bytes

    @property
    def remote_bytes(self) -> int:
        """Of them, those to other hosts; all where each rank counts as a host."""
        return self._sent_bytes

    @abstractmethod
    def begin(self, values: torch.Tensor, residual: torch.Tensor) -> None:
        """Encodes and begins to send, without waiting for others.

        Args:
            values: this rank's elements, weighted, after them the exact ones and their
                weight; they are read again until the sum has been taken.
            residual: what was not sent; read here and in :meth:`advance`.

        Raises:
            ProtocolError: the weight is negative.
            CommunicationError: it failed.
        """

    @property
    def is_done(self) -> bool:
        """Whether the sum is there."""
        return not self._arrivals

    def is_ready(self) -> bool:
        """Whether :meth:`advance` would not wait."""
        return self._have_come(self._arrivals)

    @abstractmethod
    def advance(self, what: str) -> None:
        """Waits for what must come next, and does what follows from it.

        Raises:
            CommunicationError: it failed, or did not come in time.
            ProtocolError: another message came.
        """

    @abstractmethod
    def read(self, start: int, out: torch.Tensor) -> None:
        """Writes a piece of the sum, when it is there.

        Args:
            start: its first element; a multiple of the block.
            out: whole blocks, or all to the end; within one part of the sum.
        """

    @abstractmethod
    def parts(self) -> list[range]:
        """The parts of the sum."""

    @property
    def host_bytes(self) -> int:
        """Memory for what travels, and for encoding and decoding it."""
        return 4 * self._scratch.numel() + self._message_bytes

    @property
    @abstractmethod
    def _message_bytes(self) -> int:
        """Memory for what travels, and what is kept of it beside the residual."""

    @property
    @abstractmethod
    def has_encoded(self) -> bool:
        """Whether all that this rank encodes has been encoded."""

    @abstractmethod
    def keep_errors(self, residual: torch.Tensor) -> None:
        """Puts what encoding took off into the residual."""

    def flush(self, what: str) -> None:
        """Waits until all that was sent has left this rank's memory.

        Raises:
            CommunicationError: it failed.
        """
        for transfers in self._last_sends:
            self._settle(transfers, what)

    def _open(self, values: torch.Tensor) -> int:
        """Begins a message; the index of memory that is free again."""
        weight = float(values[-1])
        if weight < 0.0:
            raise ProtocolError(f"expected a weight that is not negative, got {weight}")
        self._weight, self.total = weight, 0.0
        self._values = values[: self._numel]
        self._own_exact = values[self._numel : -1]
        self._number += 1
        # Everybody has answered the message after it, so it has long been sent.
        turn = self._number % 2
        self._settle(self._last_sends[turn], "sending an earlier message")
        return turn

    def _message(self, codec: Codec, part: range) -> CodedMessage:
        """One that travels; it is encoded with the second part of the scratch."""
        return CodedMessage(codec, part, self._scratch[1], len(self.exact))

    def _compensated(self, chunk: range, residual: torch.Tensor) -> torch.Tensor:
        """This rank's elements and what earlier messages left of them, in scratch."""
        part = slice(chunk.start, chunk.stop)
        out = self._scratch[0, : len(chunk)]
        return torch.add(
            self._values[part], residual[part], alpha=self._weight, out=out
        )

    def _encode(self, message: CodedMessage, residual: torch.Tensor) -> None:
        """Encodes the message's part; NaN as its weight says it is not finite."""
        is_finite = math.isfinite(self._weight)
        for chunk in chunks_of(message.part):
            if self._weight == 0.0:
                values = self._scratch[0, : len(chunk)].zero_()
            else:
                values = self._compensated(chunk, residual)
            is_finite &= message.write(chunk.start, values)
        message.exact.copy_(self._own_exact)
        message.seal(self._weight if is_finite else math.nan, self._number)

    def _keep_own_errors(self, message: CodedMessage, residual: torch.Tensor) -> None:
        if not self._weight > 0.0:
            return
        for chunk in chunks_of(message.part):
            values = self._compensated(chunk, residual)
            sent = self._scratch[1, : len(chunk)]
            message.read(chunk.start, sent)
            kept = residual[chunk.start : chunk.stop]
            torch.sub(values, sent, out=kept)
            if self._weight != 1.0:
                kept.div_(self._weight)

    def _sum_exact(self, parts: Iterable[torch.Tensor]) -> None:
        self.exact.zero_()
        for part in parts:
            self.exact.add_(part)

    def _send(self, to: int, message: CodedMessage, kind: int) -> Transfer:
        work = self._peers.send_async(message.memory, to, self._tag + kind)
        self._sent_bytes += message.memory.numel()
        return Transfer(self._peers.ranks[to], message, work)

    def _receive(self, source: int, message: CodedMessage, kind: int) -> Transfer:
        message.clear()
        work = self._peers.receive_async(message.memory, source, self._tag + kind)
        return Transfer(self._peers.ranks[source], message, work)

    def _have_come(self, arrivals: Iterable[Transfer]) -> bool:
        return all(each.message.number != 0 for each in arrivals)

    def _collect(self, arrivals: list[Transfer], what: str) -> None:
        for each in arrivals:
            self._peers.wait(each.work, f"{what}: the message of rank {each.peer}")
            if each.message.number != self._number:
                raise ProtocolError(
                    f"{what}: expected message {self._number} of rank {each.peer}, "
                    f"got {each.message.number}"
                )
        arrivals.clear()

    def _settle(self, sends: list[Transfer], what: str) -> None:
        for each in sends:
            self._peers.wait(each.work, f"{what} to rank {each.peer}")
        sends.clear()
