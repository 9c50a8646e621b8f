"""Messages between two ranks: asynchronous, bounded, each wait with a deadline.

Within a host, messages use shared memory (`elche.comm.transport.message_memory`),
otherwise gloo (`elche.comm.transport.gloo_lines`), whose threads also transfer tensors
from device to device. Each path keeps the order of sending; the receiver reads messages
by tag, in any order. A sender waits while 8 of its messages are unread. A waiting rank
receives all arriving messages, so no order of messages deadlocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from elche.comm.transport.device_messages import DeviceMessages
from elche.comm.transport.gloo_lines import GlooLine, Mailbox, end_waits
from elche.comm.transport.message_memory import IncomingMemory, OutgoingMemory
from elche.comm.transport.messages import BETWEEN_STEPS, Address, Message, Packed
from elche.comm.transport.process_group import SLEEP_S
from elche.errors import CommunicationError

LOOK_EVERY_S = 0.05


Wait = Callable[[Callable[[], bool], Sequence[int], str, float], None]
"""Calls a poll, which itself sleeps briefly, until it returns True.

Arguments: the poll, the awaited ranks, a description, and a deadline in seconds. Raises
DeadlineError at the deadline, and CommunicationError if the poll raises RuntimeError
because a rank is dead.
"""


@final
class PointToPoint:
    """This rank's end of all message paths.

    Attributes:
        memory: shared memory of both directions, by rank; set by `connect`.
        devices: transfers of steps' tensors between devices, or None.
    """

    def __init__(self, group: Any, rank: int, world_size: int, wait: Wait) -> None:
        self.rank = rank
        self._group: Any = group
        self._world_size = world_size
        self._wait_for = wait
        self._mailbox = Mailbox(world_size)
        self._lines: dict[int, GlooLine] = {}
        self.memory: dict[int, tuple[OutgoingMemory, IncomingMemory]] = {}
        self.devices: DeviceMessages | None = None

    def connect(
        self,
        memory: dict[int, tuple[OutgoingMemory, IncomingMemory]],
        devices: DeviceMessages | None = None,
    ) -> None:
        """Opens the paths to the other ranks; a collective call between messages."""
        assert self._group is not None
        self.memory, self.devices = memory, devices
        partners = frozenset[int]() if devices is None else devices.partners
        for rank in (set(range(self._world_size)) - memory.keys()) | partners:
            if rank not in self._lines and rank != self.rank:
                self._lines[rank] = GlooLine(self._mailbox, self._group, rank)
        for rank, line in self._lines.items():
            line.devices = devices if rank in partners else None

    def receive(self, address: Address, timeout_s: float) -> Message:
        """Waits for a message and returns it.

        Raises:
            DeadlineError: the message did not arrive in time.
            CommunicationError: the connection failed.
        """
        inbox, tag = self._mailbox.inboxes[address.rank], address.tag
        self._wait(lambda: inbox.has(tag), address.rank, address.what, timeout_s)
        with self._mailbox.lock:
            message = inbox.take(tag)
            self._mailbox.room.notify_all()
        if self.devices is not None:
            self.devices.mark_used(message.tensors)
        return message

    def send(self, address: Address, message: Message, timeout_s: float) -> None:
        """Sends a message; waits only while too many older messages are unread.

        Raises:
            DeadlineError: older messages were not read in time.
            CommunicationError: the connection failed.
        """
        rank, tag = address.rank, address.tag
        devices = None if tag >= BETWEEN_STEPS else self.devices
        by_device = devices is not None and rank in devices.partners
        on_device = devices is not None and devices.serves(rank, message.tensors)
        packed = Packed(message, on_device)
        # A step's messages to one rank use one path, so that they arrive in order.
        by_memory = rank in self.memory and not by_device
        way = self.memory[rank][0] if by_memory else self._lines[rank]
        what = f"room to send {address.what}"
        self._wait(lambda: way.send(tag, packed), rank, what, timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Waits until all sent messages have been received."""
        memory = {rank: outgoing for rank, (outgoing, _) in self.memory.items()}
        for rank, way in (*self._lines.items(), *memory.items()):
            self._wait(
                lambda way=way: not way.pending,  # type: ignore[misc]
                *(rank, "sent messages to be received", timeout_s),
            )

    def close(self) -> None:
        """Closes the connections, and ends the threads."""
        group, self._group = self._group, None
        if group is None:
            return
        with self._mailbox.lock:
            self._mailbox.is_closed = True
            self._mailbox.changed.notify_all()
        if self._lines:
            end_waits(group, self.rank, self._world_size)
        for line in self._lines.values():
            line.close()
        for ends in self.memory.values():
            for end in ends:
                end.close()
        # Else the memory stays until the garbage collector runs.
        self._lines, self.memory = {}, {}

    def _wait(
        self, ready: Callable[[], bool], rank: int, what: str, timeout_s: float
    ) -> None:
        try:
            self._wait_for(partial(self._look, ready, rank), [rank], what, timeout_s)
        finally:
            self._mailbox.is_waiting = False

    def _look(self, ready: Callable[[], bool], rank: int) -> bool:
        """Sleeps briefly unless `ready`; receives messages meanwhile."""
        mailbox = self._mailbox
        until_s = time.monotonic() + LOOK_EVERY_S
        pause_s = SLEEP_S if self.memory else LOOK_EVERY_S
        while True:
            has_ended = rank in self.memory and self.memory[rank][1].is_closed
            self._read_memory()
            with mailbox.lock:
                if mailbox.is_closed:
                    raise CommunicationError("the pipeline has been closed")
                if ready():
                    return True
                if rank in mailbox.broken:
                    raise RuntimeError(mailbox.broken[rank])
                if has_ended:
                    raise RuntimeError("it has closed its end")
                if time.monotonic() > until_s:
                    return False
                if not mailbox.is_waiting:
                    mailbox.is_waiting = True
                    mailbox.room.notify_all()
                mailbox.changed.wait(pause_s)

    def _read_memory(self) -> None:
        """Reads the messages of all ranks, so that no sender waits for room forever."""
        for rank, (_, incoming) in self.memory.items():
            for tag, message in incoming.read():
                self._mailbox.inboxes[rank].append((tag, message))
