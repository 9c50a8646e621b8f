"""Messages between ranks that are threads of the test, for elche's own transport.

As with gloo a send ends when its receiver has asked for it, and what has been received
is there when the receive has been waited for. Each wait has a deadline.

Devices' transfers are as NCCL's: in order without tags, and seen to be through by
looking. Here they take some looks, and fail unless the receiver has come first.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from elche.pipeline.peers.device_messages import DeviceMessages, TwoWays
from elche.pipeline.peers.transport import Transport

DEADLINE_S = 60.0


@dataclass
class Work:
    """One end of a transfer."""

    memory: torch.Tensor
    changed: threading.Condition
    is_done: bool = False

    def wait(self) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.is_done, DEADLINE_S):
                raise RuntimeError("the other end has not come")


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The memory, as gloo takes it: a lazy conjugate or negative is not in it."""
    raw = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(raw) if raw.is_neg() else raw


class Link:
    """What is between the ranks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._waiting: dict[tuple[int, int, int], tuple[deque[Work], deque[Work]]] = (
            defaultdict(lambda: (deque(), deque()))
        )

    def put(self, way: tuple[int, int, int], memory: torch.Tensor, end: int) -> Work:
        """Begins one end (0: sends, 1: receives) of the next message on a way."""
        work = Work(memory, self.changed)
        with self.changed:
            ends = self._waiting[way]
            ends[end].append(work)
            if all(ends):
                giver, taker = ends[0].popleft(), ends[1].popleft()
                taker.memory.copy_(as_it_lies(giver.memory))
                giver.is_done = taker.is_done = True
                self.changed.notify_all()
        return work


class Port:
    """One rank's end, as `PointToPoint` describes it."""

    def __init__(self, link: Link, rank: int) -> None:
        self._link = link
        self._rank = rank

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._link.put((self._rank, rank, tag), tensors[0], 0)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._link.put((rank, self._rank, tag), tensors[0], 1)


class NoWatch:
    """Nobody is told of long waits."""

    def begin(self, rank: int, what: str) -> None:
        """It waits."""

    def end(self) -> None:
        """It waits no more."""

    def explain(self, rank: int) -> str:
        return "nobody knows why"


def transports(world_size: int, cables: list[Cable] | None = None) -> list[Any]:
    """A transport for each rank; to be closed.

    Args:
        world_size: ranks.
        cables: one for messages to higher ranks and one to lower ones, which then go
            from device to device.
    """
    link = Link()
    made = [
        Transport(Port(link, rank), rank, lambda: None, NoWatch())
        for rank in range(world_size)
    ]
    if cables is not None:
        everyone = frozenset(range(world_size))
        for rank, one in enumerate(made):
            ways = TwoWays(*(Plug(cable, rank) for cable in cables))
            one.devices = DeviceMessages(
                *(ways, rank, everyone, torch.device("cpu"), Beside())
            )
    return made


@dataclass
class Transfer:
    """One end of a transfer between devices; it is through after some looks."""

    memory: torch.Tensor
    other: Transfer | None = None
    looks: int = 3
    waited: bool = False

    def is_completed(self) -> bool:
        if self.other is None:
            return False
        self.looks -= 1
        return self.looks <= 0

    def wait(self) -> None:
        assert self.looks <= 0, "a wait that might have lasted"
        self.waited = True


@dataclass
class Cable:
    """All transfers of one way, in order between any two ranks."""

    looks: int = 3
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: dict[tuple[int, int], deque[Transfer]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    carried: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Plug:
    """One rank's end of a cable."""

    cable: Cable
    rank: int

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Transfer:
        with self.cable.lock:
            if not self.cable.waiting[self.rank, rank]:
                raise RuntimeError("a device sends to one that does not receive")
            there = self.cable.waiting[self.rank, rank].popleft()
            there.memory.copy_(tensors[0])  # fails on another size
            self.cable.carried.append((self.rank, rank))
            here = Transfer(tensors[0], there, self.cable.looks)
            there.other = here
            return here

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Transfer:
        here = Transfer(tensors[0], looks=self.cable.looks)
        with self.cable.lock:
            self.cable.waiting[rank, self.rank].append(here)
        return here


class Beside:
    """Stands for a side stream: what is computed is so after some looks."""

    def __init__(self, looks: int = 3) -> None:
        self.looks = looks
        self.handed_over = 0

    def computed(self) -> Callable[[], bool]:
        left = [self.looks]

        def look() -> bool:
            left[0] -= 1
            return left[0] < 0

        return look

    def beside(self) -> Any:
        return nullcontext()

    def hand_over(self, tensor: torch.Tensor) -> None:
        self.handed_over += 1
