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
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from elche.comm.control.addresses import format_address, listen
from elche.comm.control.beat_process import ignore_signals
from elche.comm.control.control_channel import heeds_key
from elche.comm.control.drop_log import DropLog
from elche.comm.control.frames import (
    HELLO_WITHIN_S,
)
from elche.comm.control.key_file import KEY_BYTES
from elche.coordination.journal import Entry, RankStream, RunRecord
from elche.coordination.liveness import SILENT_S, Liveness
from elche.coordination.protocol.events import (
    BatchesDone,
    Disconnected,
    Event,
    Failed,
    Silent,
    StepsDone,
    Tick,
)
from elche.coordination.protocol.inputs import (
    Input,
    RankAdded,
    StoreSet,
    StreamBegun,
)
from elche.coordination.protocol.instructions import Abort, Instruction
from elche.coordination.protocol.outbox import ACK_EVERY
from elche.coordination.protocol.wire import to_wire
from elche.runtime.coordinator_process.rank_connection import Hello, RankConnection
from elche.runtime.process.launchers import LaunchFacts, rank_environments
from elche.runtime.report.files import write_story

logger = logging.getLogger(__name__)

TICK_S = 0.5
STALLED_S = 10.0
"""So long ranks wait for others before a line says where these are; each further line
takes twice as long."""
GONE_S = 1.0
"""Within which the launcher sees how a process has ended, once its connection has."""
STORY = "ELCHE_STORY"
"""Beside rank 0: the file to which the story of the run is written at its end."""


_Taken: TypeAlias = "tuple[int | None, RankConnection | None, Input | None]"


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
        on_end: called once with the kind of `Abort` that ends the run.
        on_first_batch: called once, when a rank first reports batches as done.
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
        self._world_size = world_size
        self._strangers: dict[RankConnection, float] = {}
        self._key = key
        self._connections: dict[int, RankConnection] = {}
        self._inputs: deque[_Taken] = deque()
        self._waiting: dict[str, set[RankConnection]] = defaultdict(set)
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._has_ended = self.record.end is not None
        self.on_end: Callable[[str], None] = lambda kind: None
        self.on_first_batch: Callable[[], None] | None = None
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
        self._inputs.extend((source, connection, each) for each in inputs)
        if not self.core.has_more:
            self._go_on()

    def _go_on(self) -> None:
        """Sends the next slice of instructions, or handles events until one has more.

        Connections are served between slices; what they bring waits for the last one.
        """
        loop, core = asyncio.get_running_loop(), self.core
        now_s = loop.time() + self._clock_s
        told: dict[int, list[Instruction]] = defaultdict(list)
        self._sort(self.record.go_on(now_s), told)
        taken: list[_Taken] = []
        entries: list[Entry] = []
        while self._inputs and not core.has_more:
            source, _, what = one = self._inputs.popleft()
            taken.append(one)
            if what is not None:
                entries.append(entry := Entry(source, what, now_s))
                self._note(what)
                self._sort(self.record.apply(entry), told)
                self._say_refused(what)
        if entries:
            self.on_entries(entries)
        sent = [(r, self._connections.get(r), each) for r, each in told.items()]
        self._send(sent, taken, self._acks_due(taken))
        if core.has_more:
            loop.call_soon(self._go_on)

    def _note(self, what: Input) -> None:
        """Shows an event to who looks on."""
        if self.on_first_batch and isinstance(what, StepsDone | BatchesDone):
            self.on_first_batch()
            self.on_first_batch = None
        if self.on_message is None:
            return
        if not isinstance(what, StoreSet | StreamBegun | RankAdded):
            self.on_message(what)

    def _say_refused(self, what: Input) -> None:
        if isinstance(what, Failed) and self.is_outlived(what.rank):
            said = what.rank, what.error
            logger.warning("rank %d did not join the run: %s", *said)

    def _send(
        self,
        told: Sequence[tuple[int, RankConnection | None, Sequence[Instruction]]],
        taken: Sequence[_Taken],
        acks: Mapping[RankConnection, int],
    ) -> None:
        """Sends decisions, whose causes are in the journal by now."""
        self.fence_lost()
        for rank, connection, instructions in told:
            self._deliver(rank, connection, instructions)
        for _, _, what in taken:
            if isinstance(what, StoreSet):
                for waiting in self._waiting.pop(what.key, set()):
                    waiting.send_value(what.key, what.value)
        for each, count in acks.items():
            each.send({"type": "Ack", "taken": count})

    def _acks_due(self, taken: Sequence[_Taken]) -> dict[RankConnection, int]:
        """How many messages were taken of ranks that ask, or were long not told."""
        asked: dict[RankConnection, RankStream] = {}
        for source, connection, what in taken:
            stream = None if source is None else self.record.streams.get(source)
            if source is None or connection is None or stream is None:
                continue
            if what is None or stream.taken - stream.acknowledged >= ACK_EVERY:
                asked[connection] = stream
        for stream in asked.values():
            stream.acknowledged = stream.taken
        return {each: stream.taken for each, stream in asked.items()}

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

    def alive(self, rank: int, connection: RankConnection) -> None:
        """A rank's process is not stopped; its threads may all wait for the GIL."""
        self._strangers[connection] = math.inf  # no Hello comes
        self._liveness.heard(rank)

    def is_outlived(self, rank: int) -> bool:
        """Whether the run has gone on without a rank: it died, or never joined."""
        return self.record.is_outlived(rank)

    @property
    def num_ranks(self) -> int:
        """Ranks that may come."""
        return self.record.num_ranks

    def add_rank(self) -> int:
        """The number of another rank, which may join the run."""
        self.record.num_ranks += 1
        return self.record.num_ranks - 1

    def _sort(
        self, answers: Sequence[Instruction], told: dict[int, list[Instruction]]
    ) -> None:
        """Sorts instructions by rank; notes one that ends the run."""
        for instruction in answers:
            if self.on_message is not None:
                self.on_message(instruction)
            if isinstance(instruction, Abort) and self.core.aborted is not None:
                if not self._has_ended:
                    self.on_end(instruction.kind)
                self._has_ended = True
            told[instruction.rank].append(instruction)

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
        if not 0 <= rank < self.record.num_ranks or rank in self._connections:
            return False
        self._strangers.pop(connection, None)
        self._connections[rank] = connection
        self.has_admitted = True
        if hello.stream:
            self._resume(hello, connection)
        elif self.record.end is not None:
            told = [replace(self.record.end, rank=rank)]
            self._deliver(rank, connection, told)
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

    def is_connected(self, rank: int) -> bool:
        """Whether instructions reach a rank."""
        return rank in self._connections

    def heeds_signals(self, rank: int) -> bool:
        """Whether a rank has said that it ends well by itself when it is signalled."""
        return self.is_connected(rank) and bool(self.record.store.get(heeds_key(rank)))

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
            if self.sees_ends and self.core.outlives(rank):
                # Killed, which is a death, or ended by itself: its exit code tells.
                loop = asyncio.get_running_loop()
                loop.call_later(GONE_S, self.take, Disconnected(rank=rank))
            else:
                self.take(Disconnected(rank=rank))

    def store_get(self, key: str, connection: RankConnection) -> None:
        """Answers with a value now or as soon as it is published."""
        if key in self.record.store:
            connection.send_value(key, self.record.store[key])
        else:
            self._waiting[key].add(connection)

    def _deliver(
        self,
        rank: int,
        connection: RankConnection | None,
        instructions: Sequence[Instruction],
    ) -> None:
        """To a rank that has not come anew since, which takes all that it lacks."""
        if connection is None or self._connections.get(rank) is not connection:
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
            silent = self._liveness.tick()
            self._say_silent(silent)
            self.take(Tick(), *(Silent(rank=r, silent_s=SILENT_S) for r in silent))
            self._say_stalled(now_s + self._clock_s)

    def _say_silent(self, ranks: Sequence[int]) -> None:
        """Where the run does not go on without them, it waits for them."""
        for rank in ranks if self.core.aborted is None else ():
            is_ended = self.core.outlives(rank)
            comes = "elche has ended it" if is_ended else "training waits"
            logger.warning(
                "rank %d has been silent for %g s, and %s: it is stopped, or the "
                "link to it is cut",
                *(rank, SILENT_S, comes),
            )

    def _say_stalled(self, now_s: float) -> None:
        """A line where ranks have long been waiting for others that are elsewhere."""
        since_s, late = self.core.waiting_since_s, self._liveness.late()
        if late and since_s is not None and now_s - since_s >= self._patience_s:
            told = self.core.doing, self._patience_s, late
            logger.warning("the run has been %s for %g s: %s", *told)
            self._patience_s *= 2


@contextlib.contextmanager
def serve_in_thread(
    world_size: int, fence: Callable[[int], None] | None = None, joiners: int = 0
) -> Iterator[list[dict[str, str]]]:
    """Serves a run from a thread of a process that does not train (tests, notebooks).

    Args:
        world_size: ranks of the run, and of those that join it.
        fence: kills a rank's process, so that the run may go on without it.
        joiners: so many of them, the last ones, are to join it.

    Yields:
        Each rank's environment.
    """
    key = secrets.token_bytes(KEY_BYTES)
    founders = world_size - joiners
    server = CoordinatorServer(founders, key, survives=fence is not None)
    late = [server.add_rank() for _ in range(joiners)]
    server.on_lost = fence or server.on_lost
    server.sees_ends = False
    loop = asyncio.new_event_loop()
    address = loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever, name="elche-coordinator")
    thread.start()
    try:
        environments = rank_environments(founders, address, key)
        joining = environments[0] | LaunchFacts(joins=True).environment()
        yield [*environments, *({**joining, "RANK": str(rank)} for rank in late)]
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


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
