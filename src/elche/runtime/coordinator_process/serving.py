"""The coordinator's own process: serves ranks, and writes its journal to the launcher.

``serving LINK LISTENER``: two descriptors inherited from the launcher. Under torchrun
and others, rank 0 starts ``serving beside WORLD_SIZE HOST``, without a journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from logging.handlers import QueueHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, final

from elche.comm.control.addresses import format_address, listen
from elche.comm.control.control_channel import heeds_key
from elche.coordination.journal import LAUNCHER, Entry, RunRecord
from elche.coordination.protocol.events import (
    BatchesDone,
    Event,
    ModelUpdated,
    StepsDone,
    WindowClosed,
)
from elche.coordination.protocol.instructions import Instruction
from elche.monitor.event_records import is_recorded
from elche.runtime.coordinator_process.link import (
    Begin,
    Copy,
    Fence,
    Journal,
    Link,
    Status,
    Stop,
)
from elche.runtime.process.coordinator import CoordinatorServer
from elche.runtime.process.launcher_watch import ignore_signals, signal_with_parent
from elche.runtime.report.files import write_story

COPY_ENTRIES: Final = 1024
"""Journal entries after which the launcher replaces them by a snapshot."""
STORY: Final = "ELCHE_STORY"
"""Variable: file for the event log, where the coordinator runs beside rank 0."""
_FREQUENT = BatchesDone, StepsDone, WindowClosed, ModelUpdated
"""Frequent events: their status reaches the launcher with the next `Tick` only."""


@final
class CoordinatorChild:
    """One coordinator process: restores the kept state and serves the run.

    Args:
        link: connection to the launcher.
        begin: state that the launcher has kept.
        more: messages received with ``begin``, to be handled first.
    """

    def __init__(self, link: Link, begin: Begin, more: Sequence[object] = ()) -> None:
        self._link = link
        self._pending = deque(more)
        self._is_over = asyncio.Event()
        self._status = Status()
        self._entries = len(begin.journal)  # a copy gets due even if each dies soon
        self._serves = False
        self._messages: list[Event | Instruction] = []
        if begin.copy is None:
            record = RunRecord(begin.world_size, survives=begin.survives)
        else:
            record = pickle.loads(begin.copy)
        for piece in begin.journal:
            record.replay(pickle.loads(piece))
        server = CoordinatorServer(begin.world_size, begin.key, record=record)
        server.on_entries = self._write
        server.on_change = self._send_status
        server.on_lost = self._have_fenced
        if begin.shows:
            server.on_message = self._messages.append
        self._server = server

    async def serve(self, listener: socket.socket) -> None:
        """Serves ranks until the launcher sends `Stop`, or ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._receive)
        self._server.fence_lost()
        self._send_status()
        await self._server.start(listener)
        self._serves = True
        self._handle_pending()
        await self._is_over.wait()
        await self._server.stop()
        with contextlib.suppress(OSError):
            self._link.send(Stop(tuple(self._server.core.story())))

    def _receive(self) -> None:
        try:
            # `_have_fenced` may have read the message already.
            self._pending.extend(self._link.receive(waits=False))
        except (EOFError, OSError):
            os._exit(0)  # the launcher's ranks end by themselves
        # Handled after messages that ranks sent before their end.
        asyncio.get_running_loop().call_soon(self._handle_pending)

    def _handle_pending(self) -> None:
        while self._pending and self._serves:
            message: Any = self._pending.popleft()
            if isinstance(message, Stop):
                self._is_over.set()
            else:
                self._server.take_from(LAUNCHER, None, [message])

    def _have_fenced(self, rank: int) -> None:
        """Blocks until the launcher has ended the process of a lost rank."""
        self._link.send(Fence(rank))
        is_fenced = False
        while not is_fenced:
            for message in self._link.receive():
                if isinstance(message, Fence):
                    is_fenced = True
                else:
                    self._pending.append(message)
        asyncio.get_running_loop().call_soon(self._handle_pending)

    def _write(self, entries: list[Entry]) -> None:
        """Journals entries before the instructions that follow from them are sent."""
        record = self._server.record
        if not all(isinstance(entry.what, _FREQUENT) for entry in entries):
            self._send_status()
        is_of_ranks = any(entry.source not in (None, LAUNCHER) for entry in entries)
        piece = pickle.dumps(entries, pickle.HIGHEST_PROTOCOL)
        messages = tuple(filter(is_recorded, self._messages))
        self._messages.clear()
        self._link.send(Journal(piece, record.commands, is_of_ranks, messages))
        self._entries += len(entries)
        if self._entries >= COPY_ENTRIES:
            self._entries = 0
            self._link.send(Copy(pickle.dumps(record, pickle.HIGHEST_PROTOCOL)))

    def _send_status(self) -> None:
        server, record = self._server, self._server.record
        core, connected = record.core, frozenset(server.connections)
        status = Status(
            connected=connected,
            heeding=frozenset(r for r in connected if record.store.get(heeds_key(r))),
            aborted_by_others=frozenset(server.aborted_by_others),
            silent=frozenset(core.silent),
            members=frozenset(core.members),
            devices=tuple(sorted(core.devices.items())),
            aborted=core.aborted,
            end_kind="" if record.end is None else record.end.kind,
            is_finished=core.is_finished,
            has_admitted=server.has_admitted,
        )
        if status != self._status:
            self._status = status
            self._link.send(status)


def main(link_descriptor: int, listener_descriptor: int) -> None:
    """Serves one run of a launcher."""
    signal_with_parent(signal.SIGCONT)
    link = Link(socket.socket(fileno=link_descriptor))
    listener = socket.socket(fileno=listener_descriptor)
    queue: Any = SimpleNamespace(put_nowait=link.send)
    logging.getLogger().addHandler(QueueHandler(queue))  # shown where the launcher logs

    messages = list[object]()
    with contextlib.suppress(EOFError):
        while not messages:
            messages = link.receive()
        begin, *more = messages
        assert isinstance(begin, Begin)
        asyncio.run(CoordinatorChild(link, begin, more).serve(listener))


async def serve_beside_rank_0(world_size: int, host: str, key: bytes) -> None:
    """Serves until standard input ends, that is until rank 0's process is gone."""
    server = CoordinatorServer(world_size, key)
    address = await server.start(listen(host, 0))
    print(format_address(*address), flush=True)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()
    await server.stop()
    if STORY in os.environ:
        write_story(Path(os.environ[STORY]), server.core.story())


if __name__ == "__main__":
    ignore_signals()  # the launcher handles those to the process group
    if sys.argv[1] == "beside":
        key = bytes.fromhex(os.environ["ELCHE_KEY"])
        asyncio.run(serve_beside_rank_0(int(sys.argv[2]), sys.argv[3], key))
    else:
        main(*map(int, sys.argv[1:]))
