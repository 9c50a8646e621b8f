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
from collections.abc import Sequence
from typing import Final, final

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
    Fenced,
    Journal,
    Link,
    Logged,
    Lost,
    Seen,
    Status,
    Stop,
    Stopped,
)
from elche.runtime.process.coordinator import CoordinatorServer
from elche.runtime.process.launcher_watch import ignore_signals, wake_with_parent

COPY_ENTRIES: Final = 1024
"""After so many entries a copy of the record takes their place in the launcher."""
TOLD_PIECES: Final = 64
"""After so many of the journal they say how many instructions each rank has."""
_TRAINED = BatchesDone, StepsDone
_FREQUENT = *_TRAINED, WindowClosed, WindowReduced
"""Events of which the launcher hears with the next `Tick`, if they change anything."""


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
        self._pieces = 0
        self._serves = self._has_trained = False
        record = _restored(begin)
        server = CoordinatorServer(begin.world_size, begin.key, record=record)
        server.on_entries = self._write
        server.on_change = self._say_status
        server.on_lost = self._have_fenced
        if begin.shows:
            server.on_message = lambda message: link.send(Seen(message))
        self._server = server

    async def serve(self, listener: socket.socket) -> None:
        """Serves ranks until the launcher says that the run is over, or ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._receive)
        self._server.fence_lost()
        self._say_status()
        await self._server.start(listener=listener)
        self._serves = True
        self._handle_pending()
        await self._is_over.wait()
        await self._server.stop()
        with contextlib.suppress(OSError):
            self._link.send(Stopped(tuple(self._server.core.story())))

    def pend(self, messages: list[object]) -> None:
        """Queues messages that came with the start, to be handled first."""
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
        while self._pending and self._serves:
            message = self._pending.popleft()
            if isinstance(message, Command):
                self._server.take_from(LAUNCHER, None, [message.what])
            elif isinstance(message, Stop):
                self._is_over.set()

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
        has_trained = any(isinstance(entry.what, _TRAINED) for entry in entries)
        is_first = has_trained and not self._has_trained
        self._has_trained |= has_trained
        if is_first or not all(isinstance(entry.what, _FREQUENT) for entry in entries):
            self._say_status()
        self._pieces += 1
        data = pack_piece(entries, record, says_told=self._pieces % TOLD_PIECES == 0)
        is_of_ranks = any(entry.source not in (None, LAUNCHER) for entry in entries)
        self._link.send(Journal(data, record.commands, is_of_ranks))
        self._entries += len(entries)
        self._copy_now_and_then()

    def _copy_now_and_then(self) -> None:
        record = self._server.record
        if self._entries >= COPY_ENTRIES:
            self._entries = 0
            data = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
            self._link.send(Copy(data))

    def _say_status(self) -> None:
        server, record = self._server, self._server.record
        core, connected = record.core, server.connected
        status = Status(
            connected=connected,
            heeding=frozenset(filter(server.heeds_signals, connected)),
            told_to_end=frozenset(server.told_to_end),
            silent=frozenset(core.silent),
            members=frozenset(core.members),
            devices=tuple(sorted(core.devices.items())),
            aborted=core.aborted,
            end_kind="" if record.end is None else record.end.kind,
            has_trained=self._has_trained,
            is_finished=core.is_finished,
            has_admitted=server.has_admitted,
        )
        if status != self._status:
            self._status = status
            self._link.send(status)


def _restored(begin: Begin) -> RunRecord:
    """The record as it was when the last coordinator wrote its last entry."""
    if begin.copy is None:
        record = RunRecord(begin.world_size, survives=begin.survives)
    else:
        record = pickle.loads(begin.copy)
    for piece in begin.journal:
        replay_piece(record, piece)
    return record


def pack_piece(
    entries: Sequence[Entry], record: RunRecord, *, says_told: bool = False
) -> bytes:
    """A piece of the journal as bytes.

    Args:
        entries: what the record took.
        record: as it is after them.
        says_told: how many instructions each rank has is said as well, so that the next
            coordinator does not keep them.
    """
    told = [(r, s.told.taken) for r, s in record.streams.items()] if says_told else []
    return pickle.dumps((entries, told), pickle.HIGHEST_PROTOCOL)


def replay_piece(record: RunRecord, data: bytes) -> None:
    """Has a record take what another one took."""
    entries, told = pickle.loads(data)
    record.replay(entries)
    for rank, count in told:
        if rank in record.streams:
            record.streams[rank].told.acknowledge(count)


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
