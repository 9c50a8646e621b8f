"""Threads that carry messages between this rank and another, and what they share.

gloo's send ends when the receiver has asked for it, and neither can be polled. So each
pair of ranks has a thread that receives what the schedule says will come, in that
order, and one that waits for sends to end. They sleep inside gloo, without Python's
lock, and touch nothing else. Each thread is woken alone: the ranks' threads share cores
with the computation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch

from elche.errors import CommunicationError, ElcheError, ProtocolError
from elche.pipeline.peers.device_messages import DeviceMessages
from elche.pipeline.peers.stage_messages import (
    HEAD_BYTES,
    Message,
    head_length,
    head_within,
    read_head,
)

JOIN_S = 5.0
POLL_S = 0.0002
"""Between two looks whether a device is through."""
_READY_TAGS = 1 << 28
"""Tags of gloo by which the receiver says that its device receives."""


class PointToPoint(Protocol):
    """What is needed of a torch process group."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Begins a send."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Begins a receive."""


@final
class Connections:
    """What the threads of a rank share, under one lock.

    Args:
        group: a torch process group of its own.
        rank: this rank.

    Attributes:
        lock: of everything here.
        condition: notified when something has come, has gone, or has broken.
        arrived: messages by rank and tag; written by the threads that receive.
        broken: why the connection to a rank has failed; written by its threads.
        closed: whether the threads are to end; what fails from then on is no fault.
        devices: carries tensors of steps from device to device; None where nothing
            does.
    """

    def __init__(self, group: PointToPoint, rank: int) -> None:
        self.rank = rank
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.arrived: dict[tuple[int, int], Message] = {}
        self.broken: dict[int, Exception] = {}
        self.closed = False
        self.devices: DeviceMessages | None = None
        self._group: PointToPoint | None = group

    @property
    def group(self) -> PointToPoint:
        """The process group.

        Raises:
            CommunicationError: it has ended.
        """
        if self._group is None:
            raise CommunicationError("the pipeline has been closed")
        return self._group

    def drop_group(self) -> None:
        """Ends the connections: whoever still waits must see it."""
        self._group = None

    def fail(self, rank: int, error: Exception) -> None:
        """The connection to a rank has failed."""
        with self.condition:
            if not self.closed:
                self.broken.setdefault(rank, error)
            self.condition.notify_all()

    def finish(self, works: list[Any], wake: threading.Condition) -> None:
        """Waits in a thread until transfers of devices are through."""
        assert self.devices is not None
        self.poll(lambda: all(work.is_completed() for work in works), wake)
        self.devices.finish(works)

    def poll(self, ready: Callable[[], bool], wake: threading.Condition) -> None:
        """Looks again and again, in a thread, until something is ready.

        What a device does wakes nobody. The deadline is that of the rank's own wait,
        which closes the transport.

        Raises:
            CommunicationError: the transport has been closed.
        """
        while not ready():
            with self.lock:
                if self.closed:
                    raise CommunicationError("the pipeline has been closed")
                wake.wait(POLL_S)


@final
class IncomingLine:
    """Receives from one rank, in the announced order.

    Attributes:
        allowed: how many announced messages may come in.
        wake: wakes the thread.
    """

    def __init__(self, shared: Connections, rank: int) -> None:
        self._shared = shared
        self._announced: deque[int] = deque()
        self.allowed = 0
        self.wake = threading.Condition(shared.lock)
        self._rank = rank
        self._thread = threading.Thread(
            target=self._run, name=f"elche-pipe-recv-{rank}", daemon=True
        )
        self._thread.start()

    def announce(self, tag: int) -> None:
        """A message will come."""
        self._announced.append(tag)

    def join(self) -> None:
        """Waits for the thread's end."""
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        shared = self._shared
        while True:
            with shared.lock:
                while not shared.closed and not (self._announced and self.allowed):
                    self.wake.wait()
                if shared.closed:
                    return
                tag = self._announced.popleft()
                self.allowed -= 1
            try:
                message = self._receive(tag)
            except (RuntimeError, ElcheError) as error:
                shared.fail(self._rank, error)
                return
            with shared.condition:
                shared.arrived[self._rank, tag] = message
                shared.condition.notify_all()

    def _receive(self, tag: int) -> Message:
        first = torch.empty(HEAD_BYTES, dtype=torch.uint8, device="cpu")
        self._wait(first, 2 * tag)
        length = head_length(first)
        packed = head_within(first, length)
        if packed is None:
            rest = torch.empty(length, dtype=torch.uint8, device="cpu")
            self._wait(rest, 2 * tag + 1)
            packed = bytes(rest.numpy())
        head = read_head(packed)
        tensors = head.buffers
        if head.on_device:
            tensors = self._from_device(head.buffers, tag)
        else:
            for buffer in head.buffers:
                self._wait(buffer, 2 * tag + 1)
        return Message(tensors, head.structure, head.needs_grad, head.failure)

    def _from_device(
        self, like: tuple[torch.Tensor, ...], tag: int
    ) -> tuple[torch.Tensor, ...]:
        shared = self._shared
        if shared.devices is None:
            raise ProtocolError(
                f"rank {self._rank} sends from device to device, but rank "
                f"{shared.rank} has not agreed to that"
            )
        tensors, works = shared.devices.receive(like, self._rank)
        ready = torch.zeros(1, dtype=torch.uint8, device="cpu")
        shared.group.send([ready], self._rank, _READY_TAGS + tag).wait()
        shared.finish(works, self.wake)
        return tensors

    def _wait(self, tensor: torch.Tensor, tag: int) -> None:
        if tensor.numel():
            self._shared.group.recv([tensor], self._rank, tag).wait()


@dataclass(slots=True)
class Parcel:
    """A message on its way to a rank.

    Attributes:
        tag: of the message.
        parts: what goes through gloo, with its tags there.
        on_device: what goes from device to device.
        computed: whether the device is through with that; None where nothing is on it.
        works: of the parts that were begun, with their memory.
    """

    tag: int
    parts: list[tuple[int, torch.Tensor]]
    on_device: tuple[torch.Tensor, ...] = ()
    computed: Callable[[], bool] | None = None
    works: list[tuple[Any, torch.Tensor]] = field(default_factory=list)

    def begin(self, group: PointToPoint, rank: int) -> None:
        """Begins to send the parts."""
        self.works = [
            (group.send([part], rank, tag), part)
            for tag, part in self.parts
            if part.numel()
        ]


@final
class OutgoingLine:
    """Keeps what was sent to one rank until it is there.

    Attributes:
        pending: what is on its way, oldest first.
        wake: wakes the thread.
    """

    def __init__(self, shared: Connections, rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self.pending: deque[Parcel] = deque()
        self.wake = threading.Condition(shared.lock)
        self._thread = threading.Thread(
            target=self._run, name=f"elche-pipe-send-{rank}", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread's end."""
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        shared = self._shared
        while True:
            with shared.lock:
                while not shared.closed and not self.pending:
                    self.wake.wait()
                if not self.pending:
                    return
                parcel = self.pending[0]
            try:
                self._carry(parcel)
            except (RuntimeError, ElcheError) as error:
                shared.fail(self._rank, error)
                return
            with shared.condition:
                self.pending.popleft()
                shared.condition.notify_all()

    def _carry(self, parcel: Parcel) -> None:
        shared = self._shared
        if parcel.computed is not None:
            shared.poll(parcel.computed, self.wake)
            parcel.begin(shared.group, self._rank)
        for work, _ in parcel.works:
            work.wait()
        if parcel.computed is None or shared.devices is None:
            return
        ready = torch.empty(1, dtype=torch.uint8, device="cpu")
        shared.group.recv([ready], self._rank, _READY_TAGS + parcel.tag).wait()
        shared.finish(shared.devices.send(parcel.on_device, self._rank), self.wake)
