"""Ranks in one process that send each other messages, one call after the other.

What was sent is there as soon as its receiver has asked for it, and not before. A
message is held back while its sender is in `late`, or its sender, receiver and tag are
in `held`, as a slow link holds it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch

from elche.comm.codec.codec import Codec
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError


@dataclass(eq=False)
class Work:
    """One end of a transfer."""

    memory: torch.Tensor
    is_done: bool = False

    def wait(self, timeout: timedelta) -> None:
        if not self.is_done:
            raise RuntimeError("nobody came")


@dataclass
class Wire:
    """What is between the ranks."""

    world_size: int
    late: set[int] = field(default_factory=set)
    held: set[tuple[int, int, int]] = field(default_factory=set)
    waiting: dict[tuple[int, int, int], tuple[deque[Work], deque[Work]]] = field(
        default_factory=lambda: defaultdict(lambda: (deque(), deque()))
    )

    def deliver(self) -> None:
        for key, (sent, wanted) in self.waiting.items():
            is_held = key[0] in self.late or key in self.held
            while not is_held and sent and wanted:
                giver, taker = sent.popleft(), wanted.popleft()
                # The number comes last, as gloo writes it.
                taker.memory[:-8].copy_(giver.memory[:-8])
                taker.memory[-8:].copy_(giver.memory[-8:])
                giver.is_done = taker.is_done = True


class Peer:
    """One rank's end, with the methods of `Group` that encoded sums use."""

    timeout_s = 1.0

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire = wire
        self.rank = rank
        self.world_size = wire.world_size
        self.ranks = range(wire.world_size)
        self.exchanges: set[Any] = set()
        self.transfers: dict[Any, torch.Tensor] = {}
        self.sent_bytes = 0

    @property
    def native(self) -> Peer:
        return self

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        self.sent_bytes += tensors[0].numel()
        return self.put(0, (self.rank, to, tag), tensors[0])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        return self.put(1, (source, self.rank, tag), tensors[0])

    def put(self, end: int, key: tuple[int, int, int], memory: torch.Tensor) -> Work:
        work = Work(memory)
        self.wire.waiting[key][end].append(work)
        self.wire.deliver()
        return work

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Nobody ends a wait here."""

    def on_failure(self, text: str, missing: Sequence[int]) -> Exception:
        return CommunicationError(text)


def coded(peer: Peer, codec: Codec, numel: int, tag: int = 0) -> CodedExchange:
    """A rank's end of an exchange."""
    return CodedExchange(cast(Group, peer), codec, numel, tag)


def exchanges(
    world_size: int, codec: Codec, numel: int
) -> tuple[Wire, list[CodedExchange]]:
    """The ranks' ends of one exchange; `numel` counts the weight."""
    wire = Wire(world_size)
    ends = [coded(Peer(wire, rank), codec, numel) for rank in range(world_size)]
    return wire, ends


def summed(
    ends: list[CodedExchange], messages: list[torch.Tensor]
) -> list[torch.Tensor]:
    """One message through all ranks; what each of them gets."""
    for end, message in zip(ends, messages, strict=True):
        end.contribution(0).copy_(message)
        end.begin(0)
    poll_all(ends)
    found = [end.finish("a test").clone() for end in ends]
    for end in ends:
        end.release()
    return found


def poll_all(ends: list[CodedExchange]) -> None:
    """Polls until all that can be done is done: owners answer offers."""
    for _ in range(2):
        for end in ends:
            end.poll()
    assert all(end.poll() for end in ends)


def message(seed: int, numel: int, weight: float = 1.0) -> torch.Tensor:
    """Weighted elements between -1 and 1, and their weight."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(numel, generator=generator) * 2 - 1
    return torch.cat([values * weight, torch.tensor([weight])])


def left_out(ends: list[CodedExchange], weights: Sequence[float]) -> torch.Tensor:
    """What the residuals say is missing in the sums so far, the weights being these."""
    total = torch.zeros(len(ends[0].contribution(0)) - 1, dtype=torch.float64)
    mean = sum(weights) / len(weights)
    for exchange, weight in zip(ends, weights, strict=True):
        units = torch.full_like(total, weight)
        own = exchange._hops.own
        units[own.start : own.stop] = mean
        total += units * exchange.residual.double()
    return total
