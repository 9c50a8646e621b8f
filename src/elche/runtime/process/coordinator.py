"""The coordinator's shell: one port, authenticated connections, the pure core inside.

It reads frames, hands events to `elche.coordination.state.Coordinator`, and sends what
that answers. It runs in a process of its own: the launcher's child
(`elche.runtime.coordinator_process`), or beside rank 0 under torchrun (``python -m
elche.runtime.process.coordinator``); never in a training process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from elche.comm.control.addresses import format_address, listen
from elche.comm.control.control_channel import heeds_key
from elche.comm.control.drop_log import DropLog
from elche.comm.control.frames import (
    HELLO_WITHIN_S,
)
from elche.coordination.journal import Entry, RunRecord
from elche.coordination.liveness import SILENT_S, Liveness
from elche.coordination.protocol.events import (
    Event,
    Failed,
    Input,
    RankLost,
    StoreSet,
    StreamBegun,
    Tick,
)
from elche.coordination.protocol.instructions import Abort, Instruction
from elche.coordination.protocol.outbox import ACK_EVERY
from elche.coordination.protocol.wire import to_wire
from elche.runtime.coordinator_process.rank_connection import Hello, RankConnection
from elche.runtime.process.launcher_watch import ignore_signals, is_running
from elche.runtime.report.files import write_story

logger = logging.getLogger(__name__)

TICK_S = 0.5
STALLED_S = 10.0
"""Wait (s) for ranks until a line names them; it doubles for each further line."""
GONE_S = 1.0
"""Within which the launcher sees how a process has ended, once its connection has."""
STORY = "ELCHE_STORY"
"""Beside rank 0: the file to which the story of the run is written at its end."""
_NO_EVENT = StoreSet, StreamBegun


class CoordinatorServer:
    """Serves one run.

    Args:
        world_size: ranks of the run.
        key: the run's shared secret.
        survives: somebody fences ranks that are lost, so the run can go on without.
        record: of the run so far; None: it begins.

    Attributes:
        core: the decisions.
        record: what must not be forgotten.
        on_entries: called with what was taken, before anybody is told because of it.
        on_change: called when ranks have come or gone, or were told to end.
        sees_ends: :meth:`rank_ended` is called for each process.
        on_lost: called with a rank without which the run goes on, before anybody is
            told: it must not run any more.
        on_message: called with each event and instruction, in their order.
    """

    def __init__(
        self,
        world_size: int,
        key: bytes,
        *,
        survives: bool = False,
        record: RunRecord | None = None,
    ) -> None:
        self.record = record or RunRecord(world_size, survives=survives)
        self.core = self.record.core
        self.on_entries: Callable[[list[Entry]], None] = lambda entries: None
        self.on_change: Callable[[], None] = lambda: None
        self._clock_s = 0.0  # of the run, against that of this host
        self._liveness = Liveness(TICK_S)
        self._fenced: set[int] = set()
        self._patience_s = STALLED_S
        self.on_lost: Callable[[int], None] = lambda rank: None
        self._strangers: dict[RankConnection, float] = {}
        self._key = key
        self._connections: dict[int, RankConnection] = {}
        self._pids: dict[int, int] = {}
        self._waiting: dict[str, set[RankConnection]] = defaultdict(set)
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.on_message: Callable[[Event | Instruction], None] | None = None
        self.drops = DropLog()
        self.has_admitted = False
        self.sees_ends = True
        self.told_to_end: set[int] = set()  # because of another rank, or of none

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
    ) -> tuple[str, int]:
        """Listens there, or with a socket that listens already; returns the address."""
        loop = asyncio.get_running_loop()
        if listener is None:
            listener = listen(host, port)
        self._clock_s = self.record.clock_s(time.time(), loop.time())
        self._server = await loop.create_server(
            lambda: RankConnection(self, self._key), sock=listener
        )
        self._ticker = loop.create_task(self._tick())
        address = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def stop(self) -> None:
        """Closes every connection and the port."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._server is not None:
            self._server.close()
        for connection in (*self._connections.values(), *self._strangers):
            connection.close()
        await asyncio.sleep(0)

    def take(self, *events: Input) -> None:
        """Hands events to the core and sends what it answers.

        The instructions to one rank are sent in one piece: it wakes up for them once.
        """
        self.take_from(None, None, events)

    def take_from(
        self,
        source: int | None,
        connection: RankConnection | None,
        inputs: Sequence[Input | None],
    ) -> None:
        """The same of inputs from a rank's stream, or the launcher's.

        Args:
            source: see `Entry`.
            connection: of the rank.
            inputs: None asks how many were taken.
        """
        now_s = asyncio.get_running_loop().time() + self._clock_s
        told: dict[int, list[Instruction]] = defaultdict(list)
        entries = [Entry(source, what, now_s) for what in inputs if what is not None]
        for entry in entries:
            what = entry.what
            if self.on_message and not isinstance(what, _NO_EVENT):
                self.on_message(what)
            for instruction in self.record.apply(entry):
                if self.on_message:
                    self.on_message(instruction)
                told[instruction.rank].append(instruction)
            self._say_refused(what)
        if entries:
            self.on_entries(entries)
        self.fence_lost()
        for rank, instructions in told.items():
            self._deliver(rank, instructions)
        for entry in entries:
            if isinstance(entry.what, StoreSet):
                for waiting in self._waiting.pop(entry.what.key, set()):
                    waiting.send_value(entry.what.key, entry.what.value)
        self._acknowledge(source, connection, asks=None in inputs)

    def _acknowledge(
        self, source: int | None, connection: RankConnection | None, *, asks: bool
    ) -> None:
        """Reports the number of messages taken to a rank that asks, or now and then."""
        stream = None if source is None else self.record.streams.get(source)
        if connection is None or stream is None:
            return
        if asks or stream.taken - stream.acknowledged >= ACK_EVERY:
            stream.acknowledged = stream.taken
            connection.send({"type": "Ack", "taken": stream.taken})

    def _say_refused(self, what: Input) -> None:
        if isinstance(what, Failed) and what.rank not in self.core.members:
            said = what.rank, what.error
            logger.warning("rank %d did not join the run: %s", *said)

    def fence_lost(self) -> None:
        """Has the processes of ranks that are lost ended, once."""
        for rank in self.core.lost - self._fenced:
            self._fenced.add(rank)
            self._liveness.forget(rank)
            self.on_lost(rank)

    def beat(self, rank: int, stack: str, *, waits: bool) -> None:
        """A rank lives; see `Liveness.beat`."""
        if rank not in self._fenced:
            self._liveness.beat(rank, stack, waits=waits)

    def meet(self, connection: RankConnection) -> None:
        """A connection was made; its Hello is due within a few seconds."""
        self._strangers[connection] = asyncio.get_running_loop().time()

    def forget(self, connection: RankConnection) -> None:
        """A connection has ended."""
        self._strangers.pop(connection, None)

    def admit(self, hello: Hello, connection: RankConnection) -> bool:
        """A connection says which rank it is, and where it stands in its stream.

        A rank that connects after the end of the run gets the reason at once: it may
        only read and wait, as a rank of a pipeline does until the group is there.
        """
        rank = hello.rank
        if not self.record.expects(rank) or rank in self._connections:
            return False
        self._strangers.pop(connection, None)
        self._connections[rank], self._pids[rank] = connection, hello.pid
        self.has_admitted = True
        if hello.stream:
            self._resume(hello, connection)
        elif self.record.end is not None:
            told = [replace(self.record.end, rank=rank)]
            self._deliver(rank, told)
        self.on_change()
        return True

    def _resume(self, hello: Hello, connection: RankConnection) -> None:
        """A rank that can come again, from where its stream stands."""
        stream = self.record.streams.get(hello.rank)
        if stream is not None and stream.name == hello.stream:
            stream.told.acknowledge(hello.received)
            lacks = map(to_wire, stream.told.rest())
            resumed = {"type": "Resumed", "taken": stream.taken}
            connection.send(resumed, *lacks)
        else:
            connection.send({"type": "Resumed", "taken": 0})
            self.take(StreamBegun(hello.rank, hello.stream))

    def acknowledge(self, rank: int, received: int) -> None:
        """A rank has so many instructions of its stream."""
        if rank in self.record.streams:
            self.record.streams[rank].told.acknowledge(received)

    @property
    def connected(self) -> frozenset[int]:
        """Ranks that instructions reach."""
        return frozenset(self._connections)

    def heeds_signals(self, rank: int) -> bool:
        """True if a rank has said that it ends well by itself when it is signalled."""
        return bool(self.record.store.get(heeds_key(rank)))

    def release(self, rank: int) -> None:
        """A rank leaves; it may come back with another connection for another run."""
        self._liveness.forget(rank)
        self._connections.pop(rank, None)
        self.on_change()

    def lost(self, rank: int, connection: RankConnection) -> None:
        """A rank's connection has ended."""
        if self._connections.get(rank) is connection:
            del self._connections[rank]
            self._liveness.forget(rank)
            self.on_change()
            if self.sees_ends and self.core.survives(rank):
                # Killed, which is a death, or ended by itself: its exit code tells.
                loop = asyncio.get_running_loop()
                loop.call_later(GONE_S, self.take, RankLost(rank=rank))
            else:
                self.take(RankLost(rank=rank))

    def store_get(self, key: str, connection: RankConnection) -> None:
        """Answers with a value now or as soon as it is published."""
        if key in self.record.store:
            connection.send_value(key, self.record.store[key])
        else:
            self._waiting[key].add(connection)

    def _deliver(self, rank: int, instructions: Sequence[Instruction]) -> None:
        connection = self._connections.get(rank)
        if connection is None:
            return
        connection.send(*map(to_wire, instructions))
        aborts = (i for i in instructions if isinstance(i, Abort))
        if any(abort.failed_rank != rank for abort in aborts):
            self.told_to_end.add(rank)
            self.on_change()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = asyncio.get_running_loop().time()
            for stranger, since_s in list(self._strangers.items()):
                if now_s - since_s > HELLO_WITHIN_S:
                    stranger.drop("no Hello came")
            silent = self._silent()
            self._say_silent(silent)
            self.take(Tick(), *(RankLost(rank=r, silent_s=SILENT_S) for r in silent))
            self._say_stalled(now_s + self._clock_s)

    def _silent(self) -> list[int]:
        """Ranks that are silent for too long now, and whose processes are stopped."""
        silent = self._liveness.tick()
        running = {rank for rank in silent if is_running(self._pids[rank])}
        for rank in running:
            self._liveness.runs(rank)
        return [rank for rank in silent if rank not in running]

    def _say_silent(self, ranks: Sequence[int]) -> None:
        """Logs silent ranks; a run that does not survive their loss waits for them."""
        for rank in ranks if self.core.aborted is None else ():
            is_ended = self.core.survives(rank)
            comes = "elche has ended it" if is_ended else "training waits"
            call = "" if self._pids[rank] else "in a call into C code, "  # another host
            logger.warning(
                "rank %d has been silent for %g s, and %s: it is stopped, %sor the "
                "link to it is cut",
                *(rank, SILENT_S, comes, call),
            )

    def _say_stalled(self, now_s: float) -> None:
        """A line where ranks have long been waiting for others that are elsewhere."""
        since_s, late = self.core.waiting_since_s, self._liveness.late()
        if late and since_s is not None and now_s - since_s >= self._patience_s:
            told = self.core.doing, self._patience_s, late
            logger.warning("the run has been %s for %g s: %s", *told)
            self._patience_s *= 2


async def _serve_beside_rank_0(world_size: int, host: str, key: bytes) -> None:
    """Serves until standard input ends, that is until rank 0's process is gone."""
    server = CoordinatorServer(world_size, key)
    address = await server.start(host)
    print(format_address(*address), flush=True)
    loop = asyncio.get_running_loop()
    parent_gone = asyncio.Event()

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            parent_gone.set()

    loop.add_reader(sys.stdin.fileno(), on_input)
    await parent_gone.wait()
    await server.stop()
    if STORY in os.environ:
        write_story(Path(os.environ[STORY]), server.core.story())


if __name__ == "__main__":
    ignore_signals()
    asyncio.run(
        _serve_beside_rank_0(
            int(sys.argv[1]), sys.argv[2], bytes.fromhex(os.environ["ELCHE_KEY"])
        )
    )
