"""A worker's end of the control channel, used by its training thread.

Other threads may only send.

If the launcher restarts dead coordinators, the channel reconnects: it keeps
unacknowledged messages and resumes the stream over the next connection. A waiting
caller sees a pause and no error.

Sending is one-way and takes microseconds. Receiving blocks only in the named waits,
each with a deadline. Every system call releases the GIL to other threads (e.g. one that
drives a reduction), so there are few: one to poll, one more to read, one to send.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from elche.comm.control.addresses import UNREACHABLE, give_up_after
from elche.comm.control.frames import (
    RESUME_S,
    UNREACHABLE_S,
    FrameCodec,
    Reconnect,
    reach,
)
from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import Abort, Instruction
from elche.coordination.protocol.outbox import ACK_EVERY, Outbox
from elche.coordination.protocol.wire import FROM_COORDINATOR, brief, from_wire, to_wire
from elche.errors import CommunicationError, DeadlineError, ElcheError, ProtocolError

_CHUNK_BYTES = 1 << 16
_LONGEST_POLL_S = 86400.0  # the system's limit is 24 days, in milliseconds
_UNCOUNTED = frozenset({"Hello", "Beat", "StoreGet", "Ack", "Flush"})
"""Message types that are not counted in a rank's stream."""
AGAIN_S = 0.05
MOST_REFUSALS = 3
"""Connections that coordinators may close before this rank counts as rejected."""
FLUSH_S = 5.0
"""Deadline (s) for the coordinator to receive a rank's last messages."""
Waiting = TypeVar("Waiting")


class ControlChannel:
    """One connection to the coordinator.

    Args:
        connection: connected socket after the greeting. Its timeout becomes the
            deadline of sending.
        codec: frame codec of the connection.
        rank: index of this rank.
        reconnect: connects to a restarted coordinator; None if it is never restarted.

    Attributes:
        is_unreachable: True if the coordinator's machine stopped acknowledging data.
    """

    def __init__(
        self,
        connection: socket.socket,
        codec: FrameCodec,
        rank: int,
        reconnect: Reconnect | None = None,
    ) -> None:
        self.is_unreachable = False
        self._rank = rank
        self._reconnect = reconnect
        self._stream = "" if reconnect is None else secrets.token_hex(8)
        self._outbox: Outbox[dict[str, Any]] = Outbox()
        self._received = 0
        self._asked: set[str] = set()
        self._has_resumed = False
        self._inbox: deque[Instruction] = deque()
        self._stored: dict[str, bytes] = {}
        self._closed = False
        self._sending = threading.RLock()
        self._failure: ElcheError | None = None  # raised once the inbox is empty
        self._cut: CommunicationError | None = None  # of sending; waits raise the first
        self._timeout_s = connection.gettimeout()
        self._use(connection, codec)

    def _use(self, connection: socket.socket, codec: FrameCodec) -> None:
        self._socket, self._codec = connection, codec
        connection.setblocking(False)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        if self._reconnect is not None:
            give_up_after(connection, UNREACHABLE_S)

    @staticmethod
    def connect(
        address: tuple[str, int],
        key: bytes,
        rank: int,
        timeout_s: float,
        *,
        resumes: bool = False,
    ) -> ControlChannel:
        """Connects and identifies this rank.

        Args:
            address: address of the coordinator.
            key: secret of the run.
            rank: index of this rank.
            timeout_s: deadline of connecting and of sending.
            resumes: True if the coordinator is restarted when it dies.

        Raises:
            CommunicationError: no coordinator answers at the address.
        """
        connection, codec = reach(address, key, rank, timeout_s)
        again = partial(reach, address, key, rank, min(timeout_s, RESUME_S))
        channel = ControlChannel(connection, codec, rank, again if resumes else None)
        channel._send(channel._hello())
        return channel

    def _hello(self) -> dict[str, Any]:
        pid = os.getpid()
        hello: dict[str, Any] = {"type": "Hello", "rank": self._rank, "pid": pid}
        if self._reconnect is not None:
            hello |= {"stream": self._stream, "received": self._received}
        return hello

    def send(self, *events: Event) -> None:
        """Sends events at once, without waiting.

        Raises:
            CommunicationError: the coordinator is lost, and the inbox is empty. If the
                inbox has messages (e.g. the reason), the first wait after them raises.
        """
        self._send(*(to_wire(event) for event in events))

    def ready(self) -> Iterator[Instruction]:
        """Yields arrived instructions, including those that arrive meanwhile."""
        if not self._inbox:
            self._read(0.0)
        while self._inbox:
            yield self._inbox.popleft()

    def receive(self, timeout_s: float, waiting_for: str) -> Instruction:
        """Waits for the next instruction and returns it.

        Raises:
            DeadlineError: no instruction arrived in time.
            CommunicationError: the coordinator is gone.
        """
        self._await(lambda: bool(self._inbox), timeout_s)
        if not self._inbox:
            raise DeadlineError(
                f"rank {self._rank} waited {timeout_s:g} s for {waiting_for}"
            )
        return self._inbox.popleft()

    def _await(self, is_there: Callable[[], bool], timeout_s: float) -> None:
        """Reads until ``is_there()``, a timeout, or the end with messages unread."""
        deadline_s = time.monotonic() + timeout_s
        while not is_there():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or (self._failure is not None and self._inbox):
                return
            self._read(left_s)

    def find_abort(self) -> Abort | None:
        """Returns an `Abort` from the inbox, if any, and leaves the inbox unchanged.

        Raises:
            CommunicationError: the coordinator is lost and sent no `Abort`. Other
                instructions in the inbox may involve dead ranks.
        """
        self._read(0.0)
        abort = next((m for m in self._inbox if isinstance(m, Abort)), None)
        if abort is None and self._failure is not None:
            raise self._failure
        return abort

    def waiting(self, kind: type[Waiting]) -> list[Waiting]:
        """Returns the inbox's instructions of one kind, without removing them."""
        return [message for message in self._inbox if isinstance(message, kind)]

    def take(self, kind: type[Waiting]) -> list[Waiting]:
        """Reads, then removes and returns the inbox's instructions of one kind."""
        self._read(0.0)
        found = self.waiting(kind)
        for each in found:
            self._inbox.remove(each)  # type: ignore[arg-type]
        return found

    def await_kinds(self, kinds: tuple[type[Any], ...], timeout_s: float) -> None:
        """Waits for an instruction of these kinds, without removing it."""
        self._await(lambda: any(isinstance(m, kinds) for m in self._inbox), timeout_s)

    def beat(self, stack: str, *, waits: bool) -> None:
        """Sends a heartbeat; called by the heartbeat thread."""
        self._send({"type": "Beat", "stack": stack, "waits": waits})

    def wait_readable(self, timeout_s: float) -> None:
        """Sleeps until an instruction arrives, at most ``timeout_s``."""
        if not self._inbox:
            self._read(max(0.0, timeout_s))

    def store_set(self, key: str, value: bytes) -> None:
        """Publishes a value for other ranks (rendezvous of a process group)."""
        self._send({"type": "StoreSet", "key": key, "value": value})

    def store_get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value that a rank publishes.

        Raises:
            DeadlineError: the value was not published in time.
            CommunicationError: the coordinator is lost, or has ended the run.
        """
        if key not in self._stored:
            self.store_ask(key)
            self._read(0.0)
        self._await(lambda: key in self._stored or bool(self.waiting(Abort)), timeout_s)
        if key in self._stored:
            return self._stored[key]
        if self._failure is not None:
            raise self._failure
        if self.waiting(Abort):
            raise CommunicationError("the run was ended")
        raise DeadlineError(
            f"rank {self._rank} waited {timeout_s:g} s for the rendezvous value "
            f"{key!r} of another rank"
        )

    def store_ask(self, key: str) -> None:
        """Requests a value; :meth:`stored` returns it once it has arrived."""
        self._send({"type": "StoreGet", "key": key})

    def store_forget(self, key: str) -> None:
        """Drops a received value, so that `store_get` requests the current one."""
        self._stored.pop(key, None)

    def stored(self, key: str) -> bytes | None:
        """Returns a received value, or None."""
        return self._stored.get(key)

    def wait_for_values(self, timeout_s: float) -> None:
        """Reads messages for at most ``timeout_s``; instructions stay in the inbox."""
        self._read(timeout_s)

    def store_published(self, keys: Sequence[str], timeout_s: float) -> set[str]:
        """Returns the keys whose values arrive within ``timeout_s``."""
        self._send(*({"type": "StoreGet", "key": key} for key in keys))
        self._await(lambda: self._stored.keys() >= set(keys), timeout_s)
        return self._stored.keys() & set(keys)

    def close(self) -> None:
        """Closes the connection after flushing it. May be called twice."""
        if not self._closed:
            with contextlib.suppress(CommunicationError, ProtocolError, OSError):
                self._flush()
            self._closed = True
            # Forked loader workers hold the socket too, so close() alone is not enough.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _flush(self) -> None:
        """Waits until the coordinator has acknowledged all kept messages."""
        if not self._outbox or self._failure is not None:
            return
        self._send({"type": "Flush"})
        deadline_s = time.monotonic() + FLUSH_S
        while self._outbox and (left_s := deadline_s - time.monotonic()) > 0:
            self._fill(left_s)

    def _send(self, *messages: dict[str, Any]) -> None:
        with self._sending:
            self._send_whole(messages)

    def _keep(self, messages: Sequence[dict[str, Any]]) -> None:
        """Keeps messages to resend to a restarted coordinator."""
        for message in messages:
            if message["type"] not in _UNCOUNTED:
                self._outbox.add(message)
            elif message["type"] == "StoreGet":
                self._asked.add(message["key"])

    def _send_whole(self, messages: Sequence[dict[str, Any]]) -> None:
        if self._closed or not messages:
            return
        if self._reconnect is not None:
            self._keep(messages)
        if self._cut is None:
            try:
                self._put(b"".join(map(self._codec.encode, messages)))
                return
            except OSError as error:
                self._note_unreachable(error)
                may_resume = self._reconnect is not None and not self.is_unreachable
                if may_resume and self._failure is None:
                    return  # the training thread notices it at reading, and reconnects
                # After a partly sent frame, the coordinator cannot read any other.
                self._cut = self._unsent(messages, error)
                self._failure = self._failure or self._cut
        if not self._inbox:
            raise self._cut

    def _unsent(
        self, messages: Sequence[dict[str, Any]], error: OSError
    ) -> CommunicationError:
        with contextlib.suppress(CommunicationError, ProtocolError):
            if self._failure is None:
                self._fill(0.5)  # the coordinator's last messages
        kinds = ", ".join(str(message["type"]) for message in messages)
        failure = self._gone(error, f" ({kinds} was not sent)")
        failure.__cause__ = error
        return failure

    def _put(self, data: bytes) -> None:
        """Writes bytes to the socket; blocks only while its buffer is full."""
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self._socket.send(data)
        if sent == len(data):
            return
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendall(memoryview(data)[sent:])
        finally:
            self._socket.setblocking(False)

    def _read(self, timeout_s: float) -> None:
        """Reads arrived data, waiting at most ``timeout_s`` for the first byte.

        Messages received before the connection's end, such as its reason, come first.
        """
        if self._closed:
            raise CommunicationError("the control channel is closed")
        if self._failure is None:
            try:
                self._fill(timeout_s)
            except (CommunicationError, ProtocolError) as error:
                self._failure = error
        if self._failure is not None and not self._inbox:
            raise self._failure

    def _fill(self, timeout_s: float) -> None:
        ready = self._poll.poll(min(timeout_s, _LONGEST_POLL_S) * 1e3)
        while ready:
            failure: OSError | None = None
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                data, failure = b"", error
            self._note_unreachable(failure)
            if not data and (self._reconnect is None or self.is_unreachable):
                raise self._gone(failure) from failure
            if not data:
                self._restore_connection(failure)
                return
            for message in self._codec.feed(data):
                self._take(message)
            ready = self._poll.poll(0.0) if len(data) == _CHUNK_BYTES else []

    def _note_unreachable(self, error: OSError | None) -> None:
        if error is not None and error.errno in UNREACHABLE:
            self.is_unreachable = True

    def _restore_connection(self, error: OSError | None) -> None:
        """Reconnects to a restarted coordinator and resumes the stream."""
        assert self._reconnect is not None
        deadline_s = time.monotonic() + RESUME_S
        refusals = 0
        with self._sending:
            self._has_resumed = False
            while not self._has_resumed:
                self._socket.close()
                try:
                    self._use(*self._reconnect())
                    refusals += 1
                    self._put(self._codec.encode(self._hello()))
                    self._await_resumed(deadline_s)
                except (CommunicationError, OSError) as failure:
                    # No socket is listening: the launcher has ended.
                    is_over = isinstance(failure.__cause__, ConnectionRefusedError)
                    is_over |= refusals == MOST_REFUSALS
                    if is_over or time.monotonic() > deadline_s:
                        raise self._gone(error) from failure
                    time.sleep(AGAIN_S)
            missing = self._asked - self._stored.keys()
            asks = [{"type": "StoreGet", "key": key} for key in sorted(missing)]
            rest = [*self._outbox.rest(), *asks]
            with contextlib.suppress(OSError):  # died again: the next read reconnects
                self._put(b"".join(map(self._codec.encode, rest)))

    def _await_resumed(self, deadline_s: float) -> None:
        while not self._has_resumed:
            if not self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
                raise CommunicationError("the coordinator does not answer")
            data = self._socket.recv(_CHUNK_BYTES)
            if not data:
                raise CommunicationError("the coordinator has closed the connection")
            for message in self._codec.feed(data):
                self._take(message)

    def _take(self, message: Any) -> None:
        kind = message.get("type") if isinstance(message, dict) else None
        if kind in ("Ack", "Resumed"):
            taken = message.get("taken")
            if type(taken) is not int:
                raise ProtocolError(f"expected {kind} with a number, got {message}")
            self._outbox.acknowledge(taken)
            self._has_resumed = True
            return
        if kind == "StoreValue":
            key, value = message.get("key"), message.get("value")
            if not isinstance(key, str) or not isinstance(value, bytes):
                raise ProtocolError(
                    f"expected StoreValue with a key and bytes, got {brief(message)}"
                )
            self._stored[key] = value
            return
        self._inbox.append(from_wire(message, FROM_COORDINATOR))
        self._received += 1
        if self._reconnect is not None and self._received % ACK_EVERY == 0:
            self._send({"type": "Ack", "received": self._received})

    def _gone(self, error: OSError | None, lost: str = "") -> CommunicationError:
        why = f": {error}" if error else ""
        return CommunicationError(
            f"rank {self._rank} lost the coordinator{why}{lost}; the launcher has "
            "ended or was stopped, or it rejected this rank (wrong ELCHE_KEY, or this "
            "rank is connected already)"
        )


def heeds_key(rank: int) -> str:
    """Store key of a rank that handles signals itself."""
    return f"heeds signals/{rank}"
