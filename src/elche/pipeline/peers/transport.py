"""Messages between ranks: asynchronous, bounded, each wait with a deadline.

Within a host they go through memory (`elche.pipeline.peers.memory_lines`), else threads
carry them over gloo (`elche.pipeline.peers.lines`); here are the waits of the rank's
own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, final

from elche.comm.transport.exchange import SLEEP_S
from elche.errors import CommunicationError, DeadlineError
from elche.pipeline.peers import waits
from elche.pipeline.peers.device_messages import DeviceMessages
from elche.pipeline.peers.lines import (
    Connections,
    IncomingLine,
    OutgoingLine,
    Parcel,
    PointToPoint,
)
from elche.pipeline.peers.memory_lines import Letter, MemoryLines
from elche.pipeline.peers.stage_messages import (
    NO_STEP_TAGS,
    Message,
    head_of,
    head_tensors,
)
from elche.pipeline.peers.waits import REASON_WITHIN_S

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
MAX_PENDING_SENDS = 8


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
class Transport:
    """This rank's end of all messages.

    Args:
        group: a torch process group of its own.
        rank: this rank.
        check: called while waiting; raises when the run has been ended from outside.
        watch: receives long waits, and names the late rank.

    Attributes:
        memory: ways to ranks of this host; set on all ranks between two messages.
    """

    def __init__(
        self,
        group: PointToPoint,
        rank: int,
        check: Callable[[], None],
        watch: LongWaits,
    ) -> None:
        self._shared = Connections(group, rank)
        self.rank = rank
        self._check = check
        self._watch = watch
        self._incoming: dict[int, IncomingLine] = {}
        self._outgoing: dict[int, OutgoingLine] = {}
        self.memory = MemoryLines({}, {})

    @property
    def devices(self) -> DeviceMessages | None:
        """Carries tensors of steps from device to device; None where nothing does."""
        return self._shared.devices

    @devices.setter
    def devices(self, found: DeviceMessages | None) -> None:
        self._shared.devices = found

    @property
    def untaken(self) -> int:
        """Messages that have arrived and were not asked for."""
        untaken = sum(line.untaken for line in self.memory.incoming.values())
        return len(self._shared.arrived) + untaken

    def end(self) -> None:
        """Whatever fails from now on is no fault; `close` comes next."""
        with self._shared.condition:
            self._shared.closed = True

    def expect(self, addresses: Iterable[Address]) -> None:
        """Announces what will come, in the order in which it will be asked for."""
        with self._shared.condition:
            for address in addresses:
                if self._goes_by_memory(address):
                    continue
                line = self._from(address.rank)
                line.announce(address.tag)
                if line.allowed:
                    line.wake.notify()

    def admit(self, address: Address) -> None:
        """Lets the next announced message of that rank come in."""
        if self._goes_by_memory(address):
            return  # it comes when this rank waits for it
        with self._shared.condition:
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
        wait = (*key[:1], address.what, timeout_s, names_late)
        if self._goes_by_memory(address):
            incoming = self.memory.incoming[address.rank]
            self._wait(lambda: incoming.has(address.tag), *wait)
            return incoming.take(address.tag)
        self._wait(lambda: key in self._shared.arrived, *wait)
        with self._shared.condition:
            message = self._shared.arrived.pop(key)
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
        wait = (rank, f"room to send {address.what}", timeout_s)
        if self._goes_by_memory(address):
            letter, outgoing = Letter(message), self.memory.outgoing[rank]
            self._wait(lambda: outgoing.has_room(letter), *wait)
            outgoing.send(address.tag, letter)
            return
        line = self._to(rank)
        self._wait(lambda: len(line.pending) < MAX_PENDING_SENDS, *wait)
        parcel = self._pack(address, message)
        if parcel.computed is None:
            try:
                parcel.begin(self._shared.group, rank)
            except RuntimeError as error:
                self._shared.fail(rank, error)
                raise self._failure(rank, address.what) from error
        with self._shared.condition:
            line.pending.append(parcel)
            line.wake.notify()

    def _pack(self, address: Address, message: Message) -> Parcel:
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
            return Parcel(tag, parts, dense, devices.stream.computed())
        for one in tensors:
            parts.append((2 * tag + 1, one.to("cpu").contiguous()))
        return Parcel(tag, parts)

    def flush(self, timeout_s: float) -> None:
        """Waits until everything sent has been taken."""
        for rank, line in (*self._outgoing.items(), *self.memory.outgoing.items()):
            self._wait(
                lambda line=line: not line.pending,  # type: ignore[misc]
                rank,
                "its receiving what was sent",
                timeout_s,
            )

    def close(self) -> None:
        """Ends the threads. The group must have been shut down if any waits in it."""
        with self._shared.condition:
            self._shared.closed = True
            for line in self._outgoing.values():
                line.pending.clear()
                line.wake.notify()
            for incoming in self._incoming.values():
                incoming.wake.notify()
            self._shared.condition.notify_all()
        for incoming in self._incoming.values():
            incoming.join()
        for outgoing in self._outgoing.values():
            outgoing.join()
        self.memory.close()
        self._shared.drop_group()

    def _wait(
        self,
        ready: Callable[[], bool],
        rank: int,
        what: str,
        timeout_s: float,
        names_late: bool = False,
    ) -> None:
        self.memory.poll()
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
            if rank in self._shared.broken:
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
        shared, incoming = self._shared, self.memory.incoming
        until_s = time.monotonic() + LOOK_EVERY_S
        pause_s = SLEEP_S if incoming else LOOK_EVERY_S
        while True:
            is_closed = rank in incoming and incoming[rank].is_closed
            self.memory.poll()
            with shared.condition:
                is_ready = ready()
                if shared.closed:
                    raise CommunicationError("the pipeline has been closed")
                if is_closed and not is_ready:
                    shared.fail(rank, CommunicationError("it has closed its end"))
                late = time.monotonic() > until_s
                if is_ready or late or rank in shared.broken:
                    return is_ready
                shared.condition.wait(pause_s)

    def _goes_by_memory(self, address: Address) -> bool:
        """Whether messages of both ends take that way."""
        devices = None if address.tag >= NO_STEP_TAGS else self.devices
        on_devices = devices is not None and devices.reaches(address.rank)
        return address.rank in self.memory.outgoing and not on_devices

    def _check_for_a_while(self) -> None:
        """The reason for a broken connection may be on its way."""
        until_s = time.monotonic() + REASON_WITHIN_S
        while time.monotonic() < until_s:
            self._check()
            with self._shared.condition:
                self._shared.condition.wait(LOOK_EVERY_S)

    def _failure(self, rank: int, what: str) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank} lost rank {rank} while waiting for {what}: "
            f"{self._shared.broken.get(rank)}; it has ended, or closed its pipeline "
            "before this rank did: look at its own output"
        )

    def _from(self, rank: int) -> IncomingLine:
        if rank not in self._incoming:
            self._incoming[rank] = IncomingLine(self._shared, rank)
        return self._incoming[rank]

    def _to(self, rank: int) -> OutgoingLine:
        if rank not in self._outgoing:
            self._outgoing[rank] = OutgoingLine(self._shared, rank)
        return self._outgoing[rank]
