"""The coordinator's own process: serves ranks, and writes its journal to the launcher.

``python -m elche.runtime.coordinator_process.serving LINK LISTENER``: two descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import sys
from collections import deque
from enum import Enum
from typing import Final, final

from elche.comm.control.beat_process import ignore_signals
from elche.coordination.journal import LAUNCHER, Entry, RunRecord
from elche.coordination.protocol.events import (
    BatchesDone,
    StepsDone,
    WindowClosed,
    WindowReduced,
)
from elche.runtime.coordinator_process.link import (
    Begin,
    Command,
    Copy,
    Ended,
    Fenced,
    FirstBatch,
    Hold,
    Holds,
    Journal,
    Link,
    Logged,
    Lost,
    Piece,
    Promote,
    Seen,
    Status,
    Stop,
    Stopped,
    Written,
)
from elche.runtime.coordinator_process.pieces import pack_piece, replay_piece
from elche.runtime.process.coordinator import CoordinatorServer
from elche.runtime.process.launcher_watch import wake_with_parent

COPY_ENTRIES: Final = 1024
"""After so many entries a copy of the record takes their place in the launcher."""
TOLD_PIECES: Final = 64
"""After so many of the journal they say how many instructions each rank has."""
_FREQUENT = BatchesDone, StepsDone, WindowClosed, WindowReduced
"""Events of which the launcher hears with the next `Tick`, if they change anything."""


class _Phase(Enum):
    """Of a coordinator's life."""

    STANDS_BY = "another host's serves, and this one stands where that stands"
    BEGINS = "it is about to serve"
    SERVES = "ranks come to it"


@final
class CoordinatorChild:
    """One coordinator's life: from what the launcher has kept to the run's end.

    Args:
        link: to the launcher.
        begin: what it has kept.
    """

    def __init__(self, link: Link, begin: Begin) -> None:
        self._link = link
        self._pending: deque[object] = deque()
        self._is_over = asyncio.Event()
        self._status = Status()
        self._entries = len(begin.journal)  # a copy is due, however soon they die
        self._phase = _Phase.STANDS_BY if begin.stands_by else _Phase.BEGINS
        self._is_promoted = asyncio.Event()
        record = _restored(begin)
        server = CoordinatorServer(begin.world_size, begin.key, record=record)
        server.on_entries = self._write
        server.on_change = self._say_status
        server.on_lost = self._have_fenced
        server.on_end = lambda kind: link.send(Ended(kind))
        server.on_first_batch = lambda: link.send(FirstBatch())
        if begin.shows:
            server.on_message = lambda message: link.send(Seen(message))
        server.gate.pieces, server.gate.holds = begin.pieces, begin.holds
        self._server = server

    async def serve(self, listener: socket.socket) -> None:
        """Serves ranks until the launcher says that the run is over, or ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._receive)
        if self._phase is _Phase.STANDS_BY:
            self._handle_pending()
            await self._is_promoted.wait()
        self._server.gate.act(self._server.fence_lost)
        self._say_status()
        await self._server.start(listener=listener)
        self._phase = _Phase.SERVES
        self._handle_pending()
        await self._is_over.wait()
        await self._server.stop()
        with contextlib.suppress(OSError):
            self._link.send(Stopped(tuple(self._server.core.story())))

    def pend(self, messages: list[object]) -> None:
        """What has come with the beginning, to be handled first."""
        self._pending.extend(messages)

    def _receive(self) -> None:
        try:
            # What it was called for may have been read already, with a `Fenced`.
            self._pending.extend(self._link.receive(waits=False))
        except (EOFError, OSError):
            os._exit(0)  # the launcher's ranks end by themselves
        # After what ranks have sent by now: their last words, before their end.
        asyncio.get_running_loop().call_soon(self._handle_pending)

    def _handle_pending(self) -> None:
        server, gate = self._server, self._server.gate
        while self._pending and self._phase is not _Phase.BEGINS:
            message = self._pending.popleft()
            if isinstance(message, Command):
                server.take_from(LAUNCHER, None, [message.what])
            elif isinstance(message, Written):
                gate.written(message.pieces)
            elif isinstance(message, Hold):
                self._hold(message)
            elif isinstance(message, Piece):
                self._follow(message)
            elif isinstance(message, Promote):
                server.record.places |= message.places
                self._phase = _Phase.BEGINS
                self._is_promoted.set()
            elif isinstance(message, Stop):
                self._is_over.set()

    def _hold(self, message: Hold) -> None:
        gate = self._server.gate
        if message.holds:
            gate.holds = True
            self._link.send(Holds())
        else:
            gate.open()

    def _follow(self, piece: Piece) -> None:
        """Stands where the coordinator stands that serves on another host."""
        record = self._server.record
        replay_piece(record, piece.data)
        self._server.gate.pieces += 1
        self._entries += 1
        self._copy_now_and_then()

    def _have_fenced(self, rank: int) -> None:
        """Waits for the launcher: nobody is told before."""
        self._link.send(Lost(rank))
        is_fenced = False
        while not is_fenced:
            for message in self._link.receive():
                if isinstance(message, Fenced):
                    is_fenced = True
                else:
                    self._pending.append(message)
        asyncio.get_running_loop().call_soon(self._handle_pending)

    def _write(self, entries: list[Entry]) -> None:
        """Before anybody is told what follows from them."""
        record = self._server.record
        if not all(isinstance(entry.what, _FREQUENT) for entry in entries):
            self._say_status()
        gate = self._server.gate
        gate.pieces += 1
        data = pack_piece(entries, record, says_told=gate.pieces % TOLD_PIECES == 0)
        is_of_ranks = any(entry.source not in (None, LAUNCHER) for entry in entries)
        self._link.send(Journal(data, record.commands, is_of_ranks))
        self._entries += len(entries)
        self._copy_now_and_then()

    def _copy_now_and_then(self) -> None:
        record, pieces = self._server.record, self._server.gate.pieces
        if self._entries >= COPY_ENTRIES and not record.core.has_more:
            self._entries = 0
            data = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
            self._link.send(Copy(data, pieces))

    def _say_status(self) -> None:
        server, core = self._server, self._server.core
        ranks = range(server.num_ranks)
        connected = frozenset(filter(server.is_connected, ranks))
        status = Status(
            connected=connected,
            heeding=frozenset(filter(server.heeds_signals, connected)),
            told_to_end=frozenset(server.told_to_end),
            silent=frozenset(core.silent),
            members=frozenset(r for r in ranks if not server.is_outlived(r)),
            mortal=frozenset(r for r in ranks if not core.outlives(r)),
            unjoined=tuple(sorted(server.record.unjoined.items())),
            devices=tuple(sorted(core.devices.items())),
            aborted=core.aborted,
            why_closed=core.why_closed,
            is_finished=core.is_finished,
            has_admitted=server.has_admitted,
        )
        if status != self._status:
            self._status = status
            self._link.send(status)


def _restored(begin: Begin) -> RunRecord:
    """The record as it was when the last coordinator wrote its last entry."""
    if begin.copy is None:
        record = RunRecord(
            begin.world_size,
            survives=begin.survives,
            several_hosts=begin.several_hosts,
        )
    else:
        record = pickle.loads(begin.copy)
    record.places |= begin.places
    for piece in begin.journal:
        replay_piece(record, piece)
    return record


@final
class _ToLauncher(logging.Handler):
    """Log lines appear where the launcher's do."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a line."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        self._link.send(Logged(record.name, record.levelno, text))


def main() -> None:
    """Serves one run; signals to the process group are the launcher's to heed."""
    ignore_signals()
    wake_with_parent()
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    listener = socket.socket(fileno=int(sys.argv[2]))
    logging.getLogger().addHandler(_ToLauncher(link))
    messages = list[object]()
    with contextlib.suppress(EOFError):
        while not messages:
            messages = link.receive()
        begin, *more = messages
        assert isinstance(begin, Begin)
        asyncio.run(_serve(link, begin, more, listener))


async def _serve(
    link: Link, begin: Begin, more: list[object], listener: socket.socket
) -> None:
    child = CoordinatorChild(link, begin)
    child.pend(more)
    await child.serve(listener)


if __name__ == "__main__":
    main()
