"""Messages of the launcher and its coordinator, over a pair of sockets.

The pair is between these two processes alone, parent and child, so what travels is
pickled, as copies of the record are. Pieces of the journal are msgpack, since they go
to other hosts as well. The launcher looks into neither.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from elche.coordination.protocol.events import Event
from elche.coordination.protocol.inputs import Input
from elche.coordination.protocol.instructions import Instruction

LENGTH: Final = struct.Struct(">I")
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Begin:
    """To a coordinator: the run as far as it is known, and how to serve it.

    Attributes:
        world_size: ranks that the run begins with.
        key: the run's secret.
        survives: the launcher fences ranks.
        several_hosts: ranks are on several.
        places: of ranks on other hosts, in words.
        shows: every message is wanted, for a display.
        copy: of the record, pickled; None: the run begins.
        journal: pieces since then.
        pieces: of the journal in all.
        holds: see `Hold`.
        stands_by: another host's coordinator serves, of which `Piece` comes.
    """

    world_size: int
    key: bytes
    survives: bool
    several_hosts: bool
    places: Mapping[int, str]
    shows: bool
    copy: bytes | None
    journal: tuple[bytes, ...]
    pieces: int = 0
    holds: bool = False
    stands_by: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """To it: an input of the launcher's own."""

    what: Input


@dataclass(frozen=True, slots=True)
class Fenced:
    """To it: the process of this rank does not run any more."""

    rank: int


@dataclass(frozen=True, slots=True)
class Hold:
    """To it: what follows from a piece waits for `Written` from now on, or not.

    That it does it answers, after all pieces from which anybody was told something.
    """

    holds: bool


@dataclass(frozen=True, slots=True)
class Written:
    """To it: another host has so many pieces of the journal."""

    pieces: int


@dataclass(frozen=True, slots=True)
class Piece:
    """To it, while it stands by: what the coordinator that serves took."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Promote:
    """To it: it serves from now on; ranks of other hosts are at these places."""

    places: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Stop:
    """To it: the run is over, and its story is wanted."""


@dataclass(frozen=True, slots=True)
class Status:
    """From it: what a launcher asks about the run.

    It may be half a second old. What a launcher decides by it about ranks of other
    hosts it hands to the core, which decides again (`HostLeaves`, `Join`).

    Attributes:
        connected: ranks that instructions reach.
        heeding: those that end well by themselves when they are signalled.
        told_to_end: ranks that were told to, because of another or of none.
        silent: ranks that were killed because they were silent.
        members: ranks that are in the run, or have left it in order.
        mortal: members whose death would end the run.
        unjoined: why ranks that were to join have failed.
        devices: of each rank that has joined.
        aborted: why the run was ended, if it was.
        why_closed: why no rank can join the run now; "" if one can.
        is_finished: every rank has left.
        has_admitted: a rank has come.
    """

    connected: frozenset[int] = frozenset()
    heeding: frozenset[int] = frozenset()
    told_to_end: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    members: frozenset[int] = frozenset()
    mortal: frozenset[int] = frozenset()
    unjoined: tuple[tuple[int, str], ...] = ()
    devices: tuple[tuple[int, str], ...] = ()
    aborted: str | None = None
    why_closed: str = "that has not begun"
    is_finished: bool = False
    has_admitted: bool = False


@dataclass(frozen=True, slots=True)
class Journal:
    """From it, before any rank is told: what it took.

    Attributes:
        data: the piece.
        commands: inputs of the launcher that were taken since the run began.
        is_of_ranks: any of the entries came from a rank.
    """

    data: bytes
    commands: int
    is_of_ranks: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """From it: the record as it is after so many pieces of the journal, pickled."""

    record: bytes
    pieces: int


@dataclass(frozen=True, slots=True)
class Holds:
    """From it: the answer to a `Hold`."""


@dataclass(frozen=True, slots=True)
class Lost:
    """From it: the run goes on without this rank, which is to be fenced first."""

    rank: int


@dataclass(frozen=True, slots=True)
class Ended:
    """From it: the run is ended, by an `Abort` of this kind."""

    kind: str


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """From it: a rank has reported batches as done."""


@dataclass(frozen=True, slots=True)
class Seen:
    """From it, for a display: an event or an instruction."""

    message: Event | Instruction


@dataclass(frozen=True, slots=True)
class Logged:
    """From it: a line for the log."""

    name: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """From it, at its end: the story of the run."""

    story: tuple[str, ...]


def pack(message: object) -> bytes:
    """A message as a frame."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


@final
class Link:
    """The coordinator's end.

    Args:
        connection: to the launcher.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def fileno(self) -> int:
        """Of the socket, which is readable when something has come."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Hands a message to the system: it arrives even if this process is killed."""
        self._socket.sendall(pack(message))

    def receive(self, *, waits: bool = True) -> list[object]:
        """The messages that are complete now.

        Args:
            waits: until something has come.

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
