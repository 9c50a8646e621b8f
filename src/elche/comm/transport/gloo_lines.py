"""Messages between this rank and another one through gloo, handled by two threads.

gloo's transfers between two ranks can be neither polled nor cancelled. So one thread
receives the other rank's messages in order, and one waits until sent messages are
received. They block inside gloo, without the GIL. The rank's own waits have the
deadlines; closing the connections ends the threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch

from elche.comm.transport.device_messages import DeviceMessages
from elche.comm.transport.message_memory import SLOTS
from elche.comm.transport.messages import (
    FRAME_BYTES,
    Message,
    Packed,
    read_frame,
    read_head,
)
from elche.errors import CommunicationError, ElcheError, ProtocolError

JOIN_S = 5.0
POLL_S = 0.0002
"""Poll interval (s) of a transfer between devices."""
_FOREVER = timedelta(days=365)
_MESSAGE_TAG, _READY_TAG, _END_TAG = range(3)


def end_waits(group: Any, rank: int, world_size: int) -> None:
    """Ends all waits in a gloo group by a timeout, which closes all connections."""
    if world_size == 1:
        return
    with contextlib.suppress(RuntimeError):
        nothing = torch.zeros(1, device="cpu")
        work = group.recv([nothing], (rank + 1) % world_size, _END_TAG)
        work.wait(timedelta(milliseconds=1))


@final
class Inbox(list[tuple[int, Message]]):
    """Unread messages of one rank, as pairs of tag and message."""

    def has(self, tag: int) -> bool:
        """True if a message with this tag has arrived."""
        return any(each == tag for each, _ in self)

    def take(self, tag: int) -> Message:
        """Removes the oldest message with this tag."""
        at = next(at for at, (each, _) in enumerate(self) if each == tag)
        return self.pop(at)[1]


@final
class Mailbox:
    """Messages and failures of all ranks, shared with the threads under one lock.

    Attributes:
        lock: lock of all attributes.
        changed: notified when a message has arrived or was sent, or a line has failed.
        room: notified when the receiving threads may receive more messages.
        inboxes: unread messages by sending rank.
        broken: error of each failed connection, by rank.
        is_waiting: True while this rank waits, and receives without limit.
        is_closed: True if the threads must end; later failures are ignored.
    """

    def __init__(self, world_size: int) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.room = threading.Condition(self.lock)
        self.inboxes = [Inbox() for _ in range(world_size)]
        self.broken: dict[int, Exception] = {}
        self.is_waiting = False
        self.is_closed = False

    def fail(self, rank: int, error: Exception) -> None:
        """Records that the connection to a rank has failed."""
        with self.lock:
            if not self.is_closed:
                self.broken.setdefault(rank, error)
            self.changed.notify_all()


@final
class GlooLine:
    """Both directions between this rank and another one.

    Attributes:
        pending: transfers of messages not yet received, oldest first.
        devices: transfers of steps' tensors between devices, or None.
    """

    def __init__(self, mailbox: Mailbox, group: Any, rank: int) -> None:
        self._mailbox = mailbox
        self._group = group
        self._rank = rank
        self.pending: deque[Callable[[], None]] = deque()
        self.devices: DeviceMessages | None = None
        self._wake = threading.Condition(mailbox.lock)
        inbox = mailbox.inboxes[rank]
        self._threads = [
            self._started(
                "receive",
                mailbox.room,
                lambda: mailbox.is_waiting or len(inbox) < SLOTS,
                lambda: self._receive,
                inbox.append,
            ),
            self._started(
                "send",
                self._wake,
                lambda: bool(self.pending),
                lambda: self.pending[0],
                self._has_left,
            ),
        ]

    def _started(self, what: str, *way: Any) -> threading.Thread:
        name = f"elche-{what}-{self._rank}"
        thread = threading.Thread(target=self._run, name=name, args=way, daemon=True)
        thread.start()
        return thread

    def send(self, tag: int, packed: Packed) -> bool:
        """Begins to send a message; returns False if too many are pending.

        Raises:
            RuntimeError: the connection has failed.
        """
        if len(self.pending) >= SLOTS:
            return False
        # Messages lose the flags of lazy conjugates and negatives.
        plain = [one.resolve_conj().resolve_neg() for one in packed.tensors]
        parts = packed.frames(tag)
        if packed.on_device:
            assert self.devices is not None
            dense = [one.contiguous() for one in plain]
            computed = self.devices.stream.computed()
            transfer = partial(self._send_device, parts, dense, computed)
        else:
            parts += [one.to("cpu").contiguous() for one in plain]
            # Send at once, unless older messages may be waiting for the device.
            works = self._begin(parts) if self.devices is None else None
            transfer = partial(self._send_host, parts, works)
        with self._mailbox.lock:
            self.pending.append(transfer)
            self._wake.notify()
        return True

    def close(self) -> None:
        """Joins the threads, after mailbox and connections have been closed."""
        with self._mailbox.lock:
            self.pending.clear()
            self._wake.notify()
            self._mailbox.room.notify_all()
        for each in self._threads:
            each.join(JOIN_S)

    def _run(
        self,
        wake: threading.Condition,
        is_due: Callable[[], bool],
        following: Callable[[], Callable[[], Any]],
        keep: Callable[[Any], object],
    ) -> None:
        """Transfers messages in order until the connections are closed.

        Args:
            wake: condition notified when a transfer may be due.
            is_due: returns True if a transfer is due.
            following: returns the function of the next transfer.
            keep: called with that function's result.
        """
        mailbox = self._mailbox
        while True:
            with mailbox.lock:
                wake.wait_for(lambda: mailbox.is_closed or is_due())
                if mailbox.is_closed:
                    return
                carry = following()
            try:
                carried = carry()
            except (RuntimeError, ElcheError) as error:
                mailbox.fail(self._rank, error)
                return
            with mailbox.lock:
                keep(carried)
                mailbox.changed.notify_all()
            del carry, carried  # they hold the message's tensors

    def _has_left(self, _: None) -> None:
        if self.pending:
            self.pending.popleft()

    def _receive(self) -> tuple[int, Message]:
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        self._fill(frame)
        tag, head, missing = read_frame(frame)
        if missing:
            rest = torch.empty(missing, dtype=torch.uint8, device="cpu")
            self._fill(rest)
            head += rest.numpy().tobytes()
        message, on_device = read_head(head)
        if on_device:
            return tag, replace(message, tensors=self._receive_device(message.tensors))
        for one in message.tensors:
            self._fill(one)
        return tag, message

    def _receive_device(
        self, like: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        if self.devices is None:
            raise ProtocolError(
                f"rank {self._rank} sends from device to device, but this rank has "
                "not agreed to that"
            )
        with self.devices.turn:
            tensors, works = self.devices.receive(like, self._rank)
            ready = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._group.send([ready], self._rank, _READY_TAG).wait(_FOREVER)
            self._finish(self.devices, works)
        return tensors

    def _send_device(
        self,
        parts: list[torch.Tensor],
        tensors: list[torch.Tensor],
        computed: Callable[[], bool],
    ) -> None:
        """Sends once the tensors are computed and the receiver is ready."""
        assert self.devices is not None
        turn, is_lower = self.devices.turn, self.devices.rank < self._rank
        self._poll(computed)
        with turn if is_lower else contextlib.nullcontext():
            self._send_host(parts, None)
            ready = torch.empty(1, dtype=torch.uint8, device="cpu")
            self._group.recv([ready], self._rank, _READY_TAG).wait(_FOREVER)
            with contextlib.nullcontext() if is_lower else turn:
                self._finish(self.devices, self.devices.send(tensors, self._rank))

    def _finish(self, devices: DeviceMessages, works: list[Any]) -> None:
        self._poll(lambda: all(work.is_completed() for work in works))
        devices.finish(works)

    def _poll(self, ready: Callable[[], bool]) -> None:
        """Polls a device, which cannot notify a thread."""
        while not ready():
            with self._mailbox.lock:
                if self._mailbox.is_closed:
                    raise CommunicationError("the connections have been closed")
                self._wake.wait(POLL_S)

    def _begin(self, parts: list[torch.Tensor]) -> list[Any]:
        group, rank = self._group, self._rank
        return [group.send([one], rank, _MESSAGE_TAG) for one in parts if one.numel()]

    def _send_host(self, parts: list[torch.Tensor], works: list[Any] | None) -> None:
        """Waits until gloo has sent the tensors, and keeps them alive until then."""
        for work in works or self._begin(parts):
            work.wait(_FOREVER)

    def _fill(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            work = self._group.recv([tensor], self._rank, _MESSAGE_TAG)
            work.wait(_FOREVER)
