"""Encoded all-reduce in two hops: parts to their owners, their sums to all ranks.

::

    contribution ──part of each other rank, encoded──▶ its owner sums, encodes
    sum          ◀──part of each owner, encoded──────── and sends to all

That is 2 (W − 1) / W encoded messages per rank, the minimum for a sum over W ranks.
Sums are formed in float32 in rank order. Every rank decodes the same encoded bytes,
including its own, so all ranks get the same bits.

*Error feedback* (Seide et al., Interspeech 2014; Karimireddy et al., arXiv:1901.09847):
the rounding error of a message is added to the next message. A rank holds one residual:
the error of the sum in its owned part, and the errors of its own messages elsewhere.
The residual is stored per unit of weight (of the mean weight in the owned part). So a
light message does not get a heavy message's error, and the residual stays valid in a
group of other ranks (exactly, for equal weights).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch

from elche.comm.codec.codec import Codec, CodedMessage, chunks_of, parts_of
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, ProtocolError


@dataclass(slots=True)
class Transfer:
    """A message between this rank and another one.

    Attributes:
        peer: the other rank in the run.
        message: encoded message.
        work: torch's work handle.
    """

    peer: int
    message: CodedMessage
    work: Any


@final
class CodedHops:
    """One rank's side of consecutive encoded sums.

    gloo's point-to-point transfers have tags. Unlike collectives, they need not begin
    in the same order on every rank, so a rank can answer a message at any time.

    Args:
        group: process group whose deadline and error handling apply.
        codec: encoding of the messages.
        numel: number of encoded elements of a sum.
        tag: first of two tags of its transfers, the same on all ranks.
        exact: number of further elements that are sent as float32.

    Attributes:
        own: the part of the sum that this rank owns.
        residual: errors of the last committed message.
        next_residual: errors of the current message.
        exact: sums of the elements that are sent as float32.
        total: sum of the weights; NaN if a contribution was not finite.
        has_summed: True once this rank has sent its part of the current sum.
    """

    def __init__(
        self, group: Group, codec: Codec, numel: int, tag: int, exact: int
    ) -> None:
        rank, world_size = group.rank, group.world_size
        self._group = group
        self._tag = tag
        self._numel = numel
        self.residual = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self.next_residual = torch.zeros_like(self.residual)
        parts = parts_of(numel, world_size, codec.block)
        self.own = parts[rank]
        # Each rank starts with its successor, so that not all send to rank 0 first.
        others = [(rank + step) % world_size for step in range(1, world_size)]
        self._offers = {r: CodedMessage(codec, parts[r], exact) for r in others}
        self._gathered = {r: CodedMessage(codec, self.own, exact) for r in others}
        self._sums = [CodedMessage(codec, part, exact) for part in parts]
        self._arrivals: list[Transfer] = []
        self._sum_arrivals: list[Transfer] = []
        self._offered: list[Transfer] = []
        self._sum_sends: list[Transfer] = []
        self._number = 0
        self._weight = self.total = 0.0
        self._contribution = torch.zeros(0, dtype=torch.float32, device="cpu")
        self.exact = torch.zeros(exact, dtype=torch.float32, device="cpu")
        self.has_summed = False

    @property
    def held_bytes(self) -> int:
        """Memory (bytes) of residuals and messages."""
        messages = [*self._offers.values(), *self._gathered.values(), *self._sums]
        held = sum(message.memory.numel() for message in messages)
        return held + 8 * self._numel + 4 * self.exact.numel()

    def begin(self, contribution: torch.Tensor) -> None:
        """Encodes the contribution for its owners and begins to send it.

        Args:
            contribution: elements, exact elements, and the weight; the owned part is
                read until it is summed.

        Raises:
            CommunicationError: a connection has failed.
        """
        self._contribution = contribution
        self._weight = float(contribution[-1])
        self.has_summed = False
        self._number += 1
        gathered = self._gathered
        self._arrivals = [self._begun("recv", r, m, 0) for r, m in gathered.items()]
        self._sum_arrivals = [
            self._begun("recv", rank, self._sums[rank], 1) for rank in gathered
        ]
        for rank, message in self._offers.items():
            self._encode_offer(message)
            self._offered.append(self._send(rank, message, 0))

    @property
    def is_ready(self) -> bool:
        """True if :meth:`step` would not wait."""
        awaited = self._sum_arrivals if self.has_summed else self._arrivals
        return all(each.message.number != 0 for each in awaited)

    def step(self, what: str) -> bool:
        """Waits for the messages of one hop and processes them; True after the last.

        Raises:
            CommunicationError: a transfer failed.
            ProtocolError: a message has an unexpected number.
        """
        if not self.has_summed:
            self._collect(self._arrivals, what)
            self._sum_up()
            return False
        self._collect(self._sum_arrivals, what)
        self._settle(self._offered, what)  # owners' sums prove that they had the offers
        if not all(math.isfinite(message.weight) for message in self._sums):
            self.total = math.nan
        return True

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Decodes elements of the sum into ``out``; call after the last hop."""
        for message in self._sums:
            part = message.part
            for chunk in chunks_of(range(max(start, part.start), min(stop, part.stop))):
                begin = chunk.start - start
                message.read(chunk, out[begin : begin + len(chunk)])

    def keep_errors(self) -> None:
        """Adopts this message's errors as the residual for the next message."""
        kept = self.next_residual
        self.next_residual, self.residual = self.residual, kept

    def flush(self, what: str) -> None:
        """Waits until all sends have completed.

        Raises:
            CommunicationError: a send failed.
        """
        self._settle(self._offered, what)
        self._settle(self._sum_sends, what)

    def _encode_offer(self, message: CodedMessage) -> None:
        """Encodes an owner's part; weight NaN marks non-finite values."""
        weight, is_finite = self._weight, math.isfinite(self._weight)
        for chunk in chunks_of(message.part):
            at = slice(chunk.start, chunk.stop)
            if weight == 0.0:  # and not 0 times values that may be NaN
                message.write(chunk, torch.zeros_like(self.residual[at]))
                self.next_residual[at] = self.residual[at]
                continue
            values = torch.add(self._contribution[at], self.residual[at], alpha=weight)
            is_finite &= self._encode(message, chunk, values, weight)
        message.exact.copy_(self._own_exact)
        message.seal(weight if is_finite else math.nan, self._number)

    def _sum_up(self) -> None:
        """Sums this rank's part and begins to send the sum."""
        # All ranks have begun this message, so all have received this rank's last sum.
        self._settle(self._sum_sends, "sending an earlier sum")
        world_size = self._group.world_size
        gathered = [self._gathered.get(rank) for rank in range(world_size)]
        weights = [self._weight if m is None else m.weight for m in gathered]
        exacts = [self._own_exact if m is None else m.exact for m in gathered]
        torch.sum(torch.stack(exacts), dim=0, out=self.exact)
        total = sum(weights)
        message, is_finite = self._sums[self._group.rank], math.isfinite(total)
        weighing = [m for m, w in zip(gathered, weights, strict=True) if w != 0.0]
        for chunk in chunks_of(self.own):
            at = slice(chunk.start, chunk.stop)
            if not total > 0.0:
                self.next_residual[at] = self.residual[at]
                continue
            mean = total / world_size
            values = self._sum_of(chunk, weighing, mean)
            is_finite &= self._encode(message, chunk, values, mean)
        self.total = total if is_finite else math.nan
        message.exact.copy_(self.exact)
        message.seal(self.total, self._number)
        self.has_summed = True
        self._sum_sends = [self._send(rank, message, 1) for rank in self._gathered]

    def _sum_of(
        self, chunk: range, messages: list[CodedMessage | None], mean: float
    ) -> torch.Tensor:
        """Sums the ranks' messages (None for this rank) and the residual."""
        at = slice(chunk.start, chunk.stop)
        total = self.residual[at] * mean
        decoded = self.next_residual[at]  # scratch: overwritten by `_encode`
        for message in messages:
            if message is None:
                total.add_(self._contribution[at])
            else:
                message.read(chunk, decoded)
                total.add_(decoded)
        return total

    def _encode(
        self, message: CodedMessage, chunk: range, values: torch.Tensor, unit: float
    ) -> bool:
        """Encodes values and stores errors per unit; True if values are finite."""
        is_finite = message.write(chunk, values)
        errors = self.next_residual[chunk.start : chunk.stop]
        message.read(chunk, errors)
        torch.sub(values, errors, out=errors)
        if unit != 1.0:
            errors.div_(unit)
        return is_finite

    @property
    def _own_exact(self) -> torch.Tensor:
        return self._contribution[self._numel : -1]

    def _send(self, to: int, message: CodedMessage, hop: int) -> Transfer:
        return self._begun("send", to, message, hop)

    def _begun(self, call: str, peer: int, message: CodedMessage, hop: int) -> Transfer:
        """Begins to send or to receive a message."""
        group, ranks = self._group, self._group.ranks
        if call == "recv":
            message.clear()
        try:
            begin = getattr(group.native, call)
            work = begin([message.memory], peer, self._tag + hop)
        except RuntimeError as error:
            raise CommunicationError(
                f"{call} between ranks {ranks[group.rank]} and {ranks[peer]} failed: "
                f"{error}"
            ) from error
        group.transfers[work] = message.memory
        return Transfer(ranks[peer], message, work)

    def _await(self, each: Transfer, what: str) -> None:
        """Waits inside gloo, at most as long as the group's deadline."""
        group = self._group
        try:
            each.work.wait(timedelta(seconds=group.timeout_s))
        except RuntimeError as error:
            raise CommunicationError(
                f"{what} failed on rank {group.ranks[group.rank]}: {error}"
            ) from error
        group.transfers.pop(each.work, None)

    def _collect(self, arrivals: list[Transfer], what: str) -> None:
        for each in arrivals:
            self._await(each, f"{what}: the message of rank {each.peer}")
            if each.message.number != self._number:
                raise ProtocolError(
                    f"{what}: expected message {self._number} of rank {each.peer}, "
                    f"got {each.message.number}"
                )
        arrivals.clear()

    def _settle(self, sends: list[Transfer], what: str) -> None:
        for each in sends:
            self._await(each, f"{what} to rank {each.peer}")
        sends.clear()
