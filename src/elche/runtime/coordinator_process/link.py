"""Messages of the launcher and its coordinator, over a pair of sockets.

The launcher's own inputs are sent unchanged, beside these messages.

The pair is private to these two processes, parent and child, so messages are pickled,
as are the coordinator's log records. Pieces of the journal and copies of the
record are bytes, which the launcher keeps and does not unpack.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Final, final

from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import Instruction

LENGTH: Final = struct.Struct(">I")
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Begin:
    """Launcher to a new coordinator: the run's record so far, and serving options.

    Attributes:
        world_size: ranks that the run begins with.
        key: the run's secret.
        survives: the launcher fences ranks.
        shows: send the messages that the run's records are made of.
        copy: pickled copy of the record; None at the run's begin.
        journal: pieces of the journal since that copy.
    """

    world_size: int
    key: bytes
    survives: bool
    shows: bool
    copy: bytes | None
    journal: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Launcher to coordinator: the run is over; send its event log.

    The coordinator replies with a `Stop` that has the event log.
    """

    story: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """Coordinator to launcher: state of the run, at most half a second old.

    Attributes:
        connected: ranks with an open connection.
        heeding: ranks that end cleanly by themselves after a signal.
        aborted_by_others: ranks aborted for a reason other than their own failure.
        silent: ranks that were killed because they were silent.
        members: ranks that are in the run, or have left it cleanly.
        devices: device name of each rank that has joined.
        aborted: why the run was ended, if it was.
        end_kind: kind of the `Abort` that ended the run, or "".
        is_finished: every rank has left.
        has_admitted: a rank has connected.
    """

    connected: frozenset[int] = frozenset()
    heeding: frozenset[int] = frozenset()
    aborted_by_others: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    members: frozenset[int] = frozenset()
    devices: tuple[tuple[int, str], ...] = ()
    aborted: str | None = None
    end_kind: str = ""
    is_finished: bool = False
    has_admitted: bool = False


@dataclass(frozen=True, slots=True)
class Journal:
    """Coordinator to launcher: a piece of the journal, before instructions are sent.

    Attributes:
        data: the piece, pickled.
        commands: number of launcher inputs applied since the run began.
        is_of_ranks: True if an entry came from a rank.
        messages: entries and resulting instructions that the run's records are made of.
            A restarted coordinator does not repeat them.
    """

    data: bytes
    commands: int
    is_of_ranks: bool
    messages: tuple[Event | Instruction, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """Coordinator to launcher: a pickled snapshot that replaces the journal so far."""

    record: bytes


@dataclass(frozen=True, slots=True)
class Fence:
    """Coordinator to launcher: end this lost rank's process; the run continues.

    The launcher returns the `Fence` when the process has ended.
    """

    rank: int


def pack(message: object) -> bytes:
    """Encodes a message as a frame."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


@final
class Link:
    """The coordinator's end of the socket pair.

    Args:
        connection: socket to the launcher.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def fileno(self) -> int:
        """File descriptor of the socket, readable when a message has come."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Writes a message to the socket: it arrives even if this process is killed."""
        self._socket.sendall(pack(message))

    def receive(self, *, waits: bool = True) -> list[object]:
        """Returns the messages that are complete now.

        Args:
            waits: block until data has arrived.

        Raises:
            EOFError: the launcher has ended.
        """
        try:
            data = self._socket.recv(_CHUNK_BYTES, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError("the launcher has ended")
        self._buffer += data
        messages: list[object] = []
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            end = LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
        return messages
