"""Messages between ranks that are threads of the test, in gloo's place.

As with gloo a send ends when its receiver has asked for it, and what has been received
is there when the receive has been waited for. A wait that times out closes all
connections of its rank.

Devices' transfers are as NCCL's: in order without tags, and seen to be through by
looking. Here they take some looks, and fail unless the receiver has come first.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from elche.comm.transport.device_messages import DeviceMessages
from elche.comm.transport.messages import Message
from elche.comm.transport.point_to_point import PointToPoint
from elche.errors import CommunicationError, DeadlineError, ElcheError

DEADLINE_S = 60.0
TENSORS = (
    torch.randn(3, 4, dtype=torch.float64)[:, ::2].t(),
    torch.randn(2, 2, dtype=torch.complex64).conj(),
    torch.tensor([True, False]),
    torch.tensor(7, dtype=torch.int16),
    torch.empty(0, 3),
    torch.randn(5, dtype=torch.bfloat16, requires_grad=True),
    torch.tensor([1 + 2j]).conj().imag,
)
"""Of every kind that may travel."""


def check_whole(found: Message) -> None:
    """A message of `TENSORS` with the structure ``["t"]`` has come as it was sent."""
    assert found.structure == ["t"]
    for one, other in zip(found.tensors, TENSORS, strict=True):
        assert torch.equal(one, other.resolve_conj().resolve_neg())
        assert one.dtype == other.dtype
        assert not one.requires_grad


@dataclass
class Work:
    """One end of a transfer."""

    memory: torch.Tensor
    link: Link
    rank: int
    other: int
    is_done: bool = False

    def wait(self, timeout: timedelta) -> None:
        link = self.link

        def is_over() -> bool:
            return self.is_done or not link.closed.isdisjoint((self.rank, self.other))

        seconds = min(DEADLINE_S, timeout.total_seconds())
        with link.changed:
            if not link.changed.wait_for(is_over, seconds):
                link.closed.add(self.rank)
                link.changed.notify_all()
            if not self.is_done:
                raise RuntimeError("Connection closed by peer")


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The memory, as gloo takes it: a lazy conjugate or negative is not in it."""
    raw = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(raw) if raw.is_neg() else raw


class Link:
    """What is between the ranks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed: set[int] = set()
        self._waiting: dict[tuple[int, int, int], tuple[deque[Work], deque[Work]]] = (
            defaultdict(lambda: (deque(), deque()))
        )

    def put(self, way: tuple[int, int, int], memory: torch.Tensor, end: int) -> Work:
        """Begins one end (0: sends, 1: receives) of the next message on a way."""
        work = Work(memory, self, way[end], way[1 - end])
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
    """One rank's end, as torch has it."""

    def __init__(self, link: Link, rank: int) -> None:
        self._link = link
        self._rank = rank

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._link.put((self._rank, rank, tag), tensors[0], 0)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._link.put((rank, self._rank, tag), tensors[0], 1)


def wait(
    look: Callable[[], bool], ranks: Sequence[int], what: str, timeout_s: float
) -> None:
    """Waits as `Waits.until`, without a coordinator."""
    until_s = time.monotonic() + timeout_s
    try:
        while not look():
            if time.monotonic() > until_s:
                raise DeadlineError(f"waited {timeout_s:.1f} s for {[*ranks]}: {what}")
    except ElcheError:
        raise
    except RuntimeError as error:
        raise CommunicationError(f"lost {[*ranks]}: {what}: {error}") from error


def transports(
    world_size: int, cable: Cable | None = None, *, is_connected: bool = True
) -> list[Any]:
    """A transport for each rank; to be closed.

    Args:
        world_size: ranks.
        cable: of messages that then go from device to device.
        is_connected: else the test connects them.
    """
    link = Link()
    made = [
        PointToPoint(Port(link, rank), rank, world_size, wait)
        for rank in range(world_size)
    ]
    everyone = frozenset(range(world_size))
    for rank, one in enumerate(made):
        devices = None
        if cable is not None:
            cpu, plug = torch.device("cpu"), Plug(cable, rank)
            devices = DeviceMessages(plug, rank, everyone, cpu, Beside())
        if is_connected:
            one.connect({}, devices)
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
    """All transfers, in order between any two ranks."""

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
        self.marked = 0

    def computed(self) -> Callable[[], bool]:
        left = [self.looks]

        def look() -> bool:
            left[0] -= 1
            return left[0] < 0

        return look

    def beside(self) -> Any:
        return nullcontext()

    def mark_used(self, tensor: torch.Tensor) -> None:
        self.marked += 1


def untaken(ends: PointToPoint) -> int:
    """Messages that have come and were not taken."""
    ends._read_memory()
    return sum(map(len, ends._mailbox.inboxes))
