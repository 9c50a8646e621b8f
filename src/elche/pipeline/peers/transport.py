"""Messages between ranks over gloo: asynchronous, bounded, each wait with a deadline.

gloo's send ends when the receiver has asked for it, and neither can be polled. So each
pair of ranks has a thread that receives what the schedule says will come, in that
order, and one that waits for sends to end. They sleep inside gloo, without Python's
lock, and touch nothing else. Each thread is woken alone: the ranks' threads share cores
with the computation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch

from elche.errors import (
    CommunicationError,
    DeadlineError,
    ElcheError,
    ProtocolError,
)
from elche.pipeline.peers import waits
from elche.pipeline.peers.device_messages import DeviceMessages
from elche.pipeline.peers.stage_messages import (
    HEAD_BYTES,
    Message,
    head_length,
    head_of,
    head_tensors,
    head_within,
    read_head,
)
from elche.pipeline.peers.waits import REASON_WITHIN_S

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
JOIN_S = 5.0
MAX_PENDING_SENDS = 8
POLL_S = 0.0002
"""Between two looks whether a device is through."""
NO_STEP_TAGS = 1 << 26
"""Tags from here on are of messages between steps, which go through the host."""
_READY_TAGS = 1 << 28
"""Tags of gloo by which the receiver says that its device receives."""


class PointToPoint(Protocol):
    """What is needed of a torch process group."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Begins a send."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Begins a receive."""


class LongWaits(Protocol):
    """Who waits for whom, told between ranks on another way than messages."""

    def begin(self, rank: int, what: str) -> None:
        """This rank has waited for half the deadline."""

    def end(self) -> None:
        """It waits no more."""

    def explain(self, rank: int) -> str:
        """The deadline has passed, waiting for a rank: who is to blame."""

    def is_late(self, rank: int) -> bool:
        """Whether a rank that this one waits for waits for nobody itself."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a message comes from or goes to.

    Attributes:
        rank: the other rank.
        tag: distinguishes messages between two ranks; two gloo tags are made of it.
        what: for people.
    """

    rank: int
    tag: int
    what: str


@final
class _Incoming:
    """Receives from one rank, in the announced order."""

    def __init__(self, owner: Transport, rank: int) -> None:
        self._owner = owner
        self._announced: deque[int] = deque()
        self.allowed = 0
        self.wake = threading.Condition(owner.lock)
        self._rank = rank
        self._thread = threading.Thread(
            target=self._run, name=f"elche-pipe-recv-{rank}", daemon=True
        )
        self._thread.start()

    def announce(self, tag: int) -> None:
        self._announced.append(tag)

    def join(self) -> None:
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        owner = self._owner
        while True:
            with owner.lock:
                while not owner.closed and not (self._announced and self.allowed):
                    self.wake.wait()
                if owner.closed:
                    return
                tag = self._announced.popleft()
                self.allowed -= 1
            try:
                message = self._receive(tag)
            except (RuntimeError, ElcheError) as error:
                owner.broken(self._rank, error)
                return
            with owner.condition:
                owner.arrived[self._rank, tag] = message
                owner.condition.notify_all()

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
        owner = self._owner
        if owner.devices is None:
            raise ProtocolError(
                f"rank {self._rank} sends from device to device, but rank {owner.rank} "
                "has not agreed to that"
            )
        tensors, works = owner.devices.receive(like, self._rank)
        ready = torch.zeros(1, dtype=torch.uint8, device="cpu")
        owner.group.send([ready], self._rank, _READY_TAGS + tag).wait()
        owner.finish(works, self.wake)
        return tensors

    def _wait(self, tensor: torch.Tensor, tag: int) -> None:
        if tensor.numel():
            self._owner.group.recv([tensor], self._rank, tag).wait()


@dataclass(slots=True)
class _Parcel:
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
class _Outgoing:
    """Keeps what was sent to one rank until it is there."""

    def __init__(self, owner: Transport, rank: int) -> None:
        self._owner = owner
        self._rank = rank
        self.pending: deque[_Parcel] = deque()
        self.wake = threading.Condition(owner.lock)
        self._thread = threading.Thread(
            target=self._run, name=f"elche-pipe-send-{rank}", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        owner = self._owner
        while True:
            with owner.lock:
                while not owner.closed and not self.pending:
                    self.wake.wait()
                if not self.pending:
                    return
                parcel = self.pending[0]
            try:
                self._carry(parcel)
            except (RuntimeError, ElcheError) as error:
                owner.broken(self._rank, error)
                return
            with owner.condition:
                self.pending.popleft()
                owner.condition.notify_all()

    def _carry(self, parcel: _Parcel) -> None:
        owner = self._owner
        if parcel.computed is not None:
            owner.poll(parcel.computed, self.wake)
            parcel.begin(owner.group, self._rank)
        for work, _ in parcel.works:
            work.wait()
        if parcel.computed is None or owner.devices is None:
            return
        ready = torch.empty(1, dtype=torch.uint8, device="cpu")
        owner.group.recv([ready], self._rank, _READY_TAGS + parcel.tag).wait()
        owner.finish(owner.devices.send(parcel.on_device, self._rank), self.wake)


@final
class Transport:
    """This rank's end of all messages.

    Args:
        group: a torch process group of its own.
        rank: this rank.
        check: called while waiting; raises when the run has been ended from outside.
        watch: receives long waits, and names the late rank.

    Attributes:
        devices: carries tensors of steps from device to device; None where nothing
            does.
    """

    def __init__(
        self,
        group: PointToPoint,
        rank: int,
        check: Callable[[], None],
        watch: LongWaits,
    ) -> None:
        self._group: PointToPoint | None = group
        self.rank = rank
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.arrived: dict[tuple[int, int], Message] = {}
        self.closed = False
        self.devices: DeviceMessages | None = None
        self._check = check
        self._watch = watch
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._broken: dict[int, Exception] = {}

    @property
    def group(self) -> PointToPoint:
        """The process group.

        Raises:
            CommunicationError: it has ended.
        """
        if self._group is None:
            raise CommunicationError("the pipeline has been closed")
        return self._group

    def expect(self, addresses: Iterable[Address]) -> None:
        """Announces what will come, in the order in which it will be asked for."""
        with self.condition:
            for address in addresses:
                line = self._from(address.rank)
                line.announce(address.tag)
                if line.allowed:
                    line.wake.notify()

    def admit(self, address: Address) -> None:
        """Lets the next announced message of that rank come in."""
        with self.condition:
            line = self._from(address.rank)
            line.allowed += 1
            line.wake.notify()

    def receive(
        self, address: Address, timeout_s: float, names_late: bool = False
    ) -> Message:
        """Waits for an announced message.

        Args:
            address: of it.
            timeout_s: deadline.
            names_late: whether the log names a rank that is late long before that.

        Raises:
            DeadlineError: it did not come in time.
            CommunicationError: the connection broke.
        """
        key = (address.rank, address.tag)
        self._wait(
            *(lambda: key in self.arrived, address.rank, address.what, timeout_s),
            names_late,
        )
        with self.condition:
            message = self.arrived.pop(key)
        if self.devices is not None:
            self.devices.hand_over(message.tensors)
        return message

    def send(self, address: Address, message: Message, timeout_s: float) -> None:
        """Sends; waits only while too many older messages have not been taken.

        Raises:
            DeadlineError: they were not received in time.
            CommunicationError: the connection broke.
        """
        rank = address.rank
        line = self._to(rank)
        self._wait(
            lambda: len(line.pending) < MAX_PENDING_SENDS,
            rank,
            f"room to send {address.what}",
            timeout_s,
        )
        parcel = self._pack(address, message)
        if parcel.computed is None:
            try:
                parcel.begin(self.group, rank)
            except RuntimeError as error:
                self.broken(rank, error)
                raise self._failure(rank, address.what) from error
        with self.condition:
            line.pending.append(parcel)
            line.wake.notify()

    def _pack(self, address: Address, message: Message) -> _Parcel:
        tag, devices = address.tag, self.devices
        tensors = tuple(
            # Neither way carries the marks of a lazy conjugate or negative.
            one.detach().resolve_conj().resolve_neg()
            for one in message.tensors
        )
        on_device = (
            devices is not None
            and tag < NO_STEP_TAGS
            and devices.serves(address.rank, tensors)
        )
        heads = head_tensors(head_of(message, on_device))
        parts = [(2 * tag + min(at, 1), head) for at, head in enumerate(heads)]
        if devices is not None and on_device:
            dense = tuple(one.contiguous() for one in tensors)
            return _Parcel(tag, parts, dense, devices.stream.computed())
        for one in tensors:
            parts.append((2 * tag + 1, one.to("cpu").contiguous()))
        return _Parcel(tag, parts)

    def flush(self, timeout_s: float) -> None:
        """Waits until everything sent has been taken."""
        for rank, line in self._outgoing.items():
            self._wait(
                lambda line=line: not line.pending,  # type: ignore[misc]
                rank,
                "its receiving what was sent",
                timeout_s,
            )

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

    def broken(self, rank: int, error: Exception) -> None:
        """A connection has failed; called by the threads."""
        with self.condition:
            if not self.closed:
                self._broken.setdefault(rank, error)
            self.condition.notify_all()

    def close(self) -> None:
        """Ends the threads. The group must have been shut down if any waits in it."""
        with self.condition:
            self.closed = True
            for line in self._outgoing.values():
                line.pending.clear()
                line.wake.notify()
            for incoming in self._incoming.values():
                incoming.wake.notify()
            self.condition.notify_all()
        for incoming in self._incoming.values():
            incoming.join()
        for outgoing in self._outgoing.values():
            outgoing.join()
        self._group = None  # ends the connections: whoever still waits must see it

    def _wait(
        self,
        ready: Callable[[], bool],
        rank: int,
        what: str,
        timeout_s: float,
        names_late: bool = False,
    ) -> None:
        if ready():
            return
        started_s = time.monotonic()
        is_long, named_after_s = False, waits.NAMED_AFTER_S
        told_after_s = min(timeout_s, named_after_s if names_late else timeout_s) / 2
        while not self._look(ready, rank):
            waited_s = time.monotonic() - started_s
            self._check()
            if waited_s > told_after_s and not is_long:
                is_long = True
                self._watch.begin(rank, what)
            if names_late and waited_s > named_after_s:
                names_late = False
                self._name_late(rank, what, timeout_s)
            if rank in self._broken:
                self._check_for_a_while()
                raise self._failure(rank, what)
            if waited_s > timeout_s:
                raise DeadlineError(
                    f"rank {self.rank} waited {timeout_s:.1f} s for rank {rank}: "
                    f"{what}; {self._watch.explain(rank)}"
                )
        if is_long:
            self._watch.end()

    def _name_late(self, rank: int, what: str, timeout_s: float) -> None:
        if self._watch.is_late(rank):
            logger.warning(
                "the pipeline has waited %.0f s for rank %d: %s; it is late, and waits "
                "for nobody: look at its own output; it has %g s (timeout_s) in all",
                *(waits.NAMED_AFTER_S, rank, what, timeout_s),
            )

    def _look(self, ready: Callable[[], bool], rank: int) -> bool:
        """Sleeps a moment unless it is there."""
        with self.condition:
            if not ready() and rank not in self._broken:
                self.condition.wait(LOOK_EVERY_S)
            if self.closed:
                raise CommunicationError("the pipeline has been closed")
            return ready()

    def _check_for_a_while(self) -> None:
        """The reason for a broken connection may be on its way."""
        until_s = time.monotonic() + REASON_WITHIN_S
        while time.monotonic() < until_s:
            self._check()
            with self.condition:
                self.condition.wait(LOOK_EVERY_S)

    def _failure(self, rank: int, what: str) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank} lost rank {rank} while waiting for {what}: "
            f"{self._broken.get(rank)}; it has ended, or closed its pipeline before "
            "this rank did: look at its own output"
        )

    def _from(self, rank: int) -> _Incoming:
        if rank not in self._incoming:
            self._incoming[rank] = _Incoming(self, rank)
        return self._incoming[rank]

    def _to(self, rank: int) -> _Outgoing:
        if rank not in self._outgoing:
            self._outgoing[rank] = _Outgoing(self, rank)
        return self._outgoing[rank]
