"""The coordinator's shell: one port, authenticated connections, the pure core inside.

It reads frames, hands events to `elche.coordination.state.Coordinator`, and sends what
that answers. It runs in the launcher's process, or beside rank 0 under torchrun
(``python -m elche.runtime.process.coordinator``); never in a training process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elche.comm.control.addresses import format_address, listen, outlive_cuts
from elche.comm.control.control_channel import heeds_key
from elche.comm.control.frames import MAGIC, NONCE_BYTES, FrameCodec
from elche.coordination.liveness import SILENT_S, Liveness
from elche.coordination.protocol.events import (
    BatchesDone,
    Disconnected,
    Event,
    Failed,
    Left,
    Silent,
    StepsDone,
    Tick,
)
from elche.coordination.protocol.field_checks import brief
from elche.coordination.protocol.instructions import Abort, Instruction
from elche.coordination.protocol.wire import FROM_WORKERS, from_wire, to_wire
from elche.coordination.state import Coordinator
from elche.errors import ProtocolError
from elche.runtime.report.files import replace_file

logger = logging.getLogger(__name__)

TICK_S = 0.5
STALLED_S = 10.0
"""So long ranks wait for others before a line says where these are; each further line
takes twice as long."""
GONE_S = 1.0
"""Within which the launcher sees how a process has ended, once its connection has."""
KEY_BYTES = 32
HELLO_WITHIN_S = 10.0
HELLO_BYTES = 1 << 16
STACK_CHARS = 2000
STORY = "ELCHE_STORY"
"""Beside rank 0: the file to which the story of the run is written at its end."""


class CoordinatorServer:
    """Serves one run.

    Args:
        world_size: ranks of the run.
        key: the run's shared secret.
        survives: somebody fences ranks that are lost, so the run can go on without.
        several_hosts: ranks are on several.

    Attributes:
        sees_ends: :meth:`rank_ended` is called for each process.
        on_lost: called with a rank without which the run goes on, before anybody is
            told: it must not run any more.
        on_end: called once with the kind of `Abort` that ends the run.
        on_first_batch: called once, when a rank first reports batches as done.
        on_message: called with each event and instruction, in their order.
        places: of ranks that are on other hosts, in words.
        unjoined: why ranks that were to join have failed.
    """

    def __init__(
        self,
        world_size: int,
        key: bytes,
        *,
        survives: bool = False,
        several_hosts: bool = False,
    ) -> None:
        self.core = Coordinator(
            world_size, survives=survives, several_hosts=several_hosts
        )
        self._liveness = Liveness(TICK_S)
        self._fenced: set[int] = set()
        self._patience_s = STALLED_S
        self.on_lost: Callable[[int], None] = lambda rank: None
        self._world_size = world_size
        self._num_ranks = world_size
        self._strangers: dict[_Connection, float] = {}
        self._key = key
        self._connections: dict[int, _Connection] = {}
        self._events: deque[Event] = deque()
        self._store: dict[str, bytes] = {}
        self._waiting: dict[str, set[_Connection]] = defaultdict(set)
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._end: Abort | None = None
        self.on_end: Callable[[str], None] = lambda kind: None
        self.on_first_batch: Callable[[], None] | None = None
        self.on_message: Callable[[Event | Instruction], None] | None = None
        self.dropped = 0
        self.has_admitted = False
        self.sees_ends = True
        self.places: dict[int, str] = {}
        self.unjoined: dict[int, str] = {}
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
        self._server = await loop.create_server(
            lambda: _Connection(self, self._key), sock=listener
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

    def take(self, *events: Event) -> None:
        """Hands events to the core and sends what it answers.

        The instructions to one rank are sent in one piece: it wakes up for them once.
        """
        self._events.extend(events)
        if not self.core.has_more:
            self._go_on()

    def _go_on(self) -> None:
        """Sends the next slice of instructions, or handles events until one has more.

        Connections are served between slices; what they bring waits for the last one.
        """
        loop, core = asyncio.get_running_loop(), self.core
        now_s = loop.time()
        told: dict[int, list[Instruction]] = defaultdict(list)
        self._sort(core.go_on(now_s), told)
        while self._events and not core.has_more:
            event = self._events.popleft()
            if self.on_first_batch and isinstance(event, StepsDone | BatchesDone):
                self.on_first_batch()
                self.on_first_batch = None
            if self.on_message is not None:
                self.on_message(event)
            self._sort(core.handle(event, now_s), told)
            if isinstance(event, Failed) and self.is_outlived(event.rank):
                self.unjoined[event.rank] = event.error
                said = event.rank, event.error
                logger.warning("rank %d did not join the run: %s", *said)
        self._fence()
        for rank, instructions in told.items():
            self._deliver(rank, instructions)
        if core.has_more:
            loop.call_soon(self._go_on)

    def _fence(self) -> None:
        for rank in self.core.lost - self._fenced:
            self._fenced.add(rank)
            self._liveness.forget(rank)
            self.on_lost(rank)

    def beat(self, rank: int, stack: str, *, waits: bool) -> None:
        """A rank lives; see `Liveness.beat`."""
        if rank not in self._fenced:
            self._liveness.beat(rank, stack, waits=waits)

    def is_outlived(self, rank: int) -> bool:
        """Whether the run has gone on without a rank: it died, or never joined."""
        return rank in self.core.lost or not self.core.has_member(rank)

    def add_rank(self) -> int:
        """The number of another rank, which may join the run."""
        self._num_ranks += 1
        return self._num_ranks - 1

    def _sort(
        self, answers: Sequence[Instruction], told: dict[int, list[Instruction]]
    ) -> None:
        """Sorts instructions by rank; notes one that ends the run."""
        for instruction in answers:
            if self.on_message is not None:
                self.on_message(instruction)
            if isinstance(instruction, Abort) and self.core.aborted is not None:
                if self._end is None:
                    self.on_end(instruction.kind)
                self._end = instruction
            told[instruction.rank].append(instruction)

    def meet(self, connection: _Connection) -> None:
        """A connection was made; its Hello is due within a few seconds."""
        self._strangers[connection] = asyncio.get_running_loop().time()

    def forget(self, connection: _Connection) -> None:
        """A connection has ended."""
        self._strangers.pop(connection, None)

    def admit(self, rank: int, connection: _Connection) -> bool:
        """A connection says which rank it is.

        A rank that connects after the end of the run gets the reason at once: it may
        only read and wait, as a rank of a pipeline does until the group is there.
        """
        if not 0 <= rank < self._num_ranks or rank in self._connections:
            return False
        self._strangers.pop(connection, None)
        self._connections[rank] = connection
        self.has_admitted = True
        if self._end is not None:
            self._deliver(rank, [replace(self._end, rank=rank)])
        return True

    def is_connected(self, rank: int) -> bool:
        """Whether instructions reach a rank."""
        return rank in self._connections

    def heeds_signals(self, rank: int) -> bool:
        """Whether a rank has said that it ends well by itself when it is signalled."""
        return self.is_connected(rank) and bool(self._store.get(heeds_key(rank)))

    def release(self, rank: int) -> None:
        """A rank leaves; it may come back with another connection for another run."""
        self._liveness.forget(rank)
        self._connections.pop(rank, None)

    def lost(self, rank: int, connection: _Connection) -> None:
        """A rank's connection has ended."""
        if self._connections.get(rank) is connection:
            del self._connections[rank]
            self._liveness.forget(rank)
            if self.sees_ends and self.core.outlives(rank):
                # Killed, which is a death, or ended by itself: its exit code tells.
                loop = asyncio.get_running_loop()
                loop.call_later(GONE_S, self.take, Disconnected(rank=rank))
            else:
                self.take(Disconnected(rank=rank))

    def rank_ended(self, rank: int, code: int) -> None:
        """The launcher saw a rank's process end, whether or not it ever joined.

        Args:
            rank: which one.
            code: its exit code; negative for a signal.
        """
        if code > 0:
            error = f"its process ended with code {code}"
            self.take(Failed(rank=rank, error=error, traceback=""))
        else:
            self.take(Disconnected(rank=rank))

    def write_story(self, path: Path) -> None:
        """Writes the log of messages and decisions, as far as the core keeps it.

        What cannot be written is logged: the run itself has ended by then.
        """
        text = "".join(f"{line}\n" for line in self.core.story())
        try:
            replace_file(path, text)
        except OSError as error:
            logger.warning("cannot write the story of the run to %s: %s", path, error)

    def store_set(self, key: str, value: bytes) -> None:
        """Publishes a rendezvous value and answers who waits for it."""
        self._store[key] = value
        for connection in self._waiting.pop(key, set()):
            connection.send({"type": "StoreValue", "key": key, "value": value})

    def store_get(self, key: str, connection: _Connection) -> None:
        """Answers with a value now or as soon as it is published."""
        if key in self._store:
            value = self._store[key]
            connection.send({"type": "StoreValue", "key": key, "value": value})
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
            self._say_stalled(now_s)

    def _say_silent(self, ranks: Sequence[int]) -> None:
        """Where the run does not go on without them, it waits for them."""
        for rank in ranks:
            if not self.core.outlives(rank) and self.core.aborted is None:
                where = self.places.get(rank, "")
                logger.warning(
                    "rank %d%s has been silent for %g s, and training waits: it is "
                    "stopped, or the link to it is cut",
                    *(rank, where, SILENT_S),
                )

    def _say_stalled(self, now_s: float) -> None:
        """A line where ranks have long been waiting for others that are elsewhere."""
        since_s, late = self.core.waiting_since_s, self._liveness.late()
        if late and since_s is not None and now_s - since_s >= self._patience_s:
            told = self.core.doing, self._patience_s, late
            logger.warning("the run has been %s for %g s: %s", *told)
            self._patience_s *= 2


class _Connection(asyncio.Protocol):
    """One worker's connection, as the server sees it."""

    def __init__(self, server: CoordinatorServer, key: bytes) -> None:
        self._server = server
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._codec = FrameCodec(key, self._nonce, is_server=True)
        self._transport: asyncio.Transport | None = None
        self._rank: int | None = None
        self._unknown_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        outlive_cuts(transport.get_extra_info("socket"))
        self._server.meet(self)
        transport.write(MAGIC + self._nonce)

    def data_received(self, data: bytes) -> None:
        self._unknown_bytes += len(data) if self._rank is None else 0
        if self._unknown_bytes > HELLO_BYTES:
            self.drop("expected a Hello, got a flood")
            return
        events: list[Event] = []
        try:
            try:
                for message in self._codec.feed(data):
                    events += self._events(message)
            finally:
                self._server.take(*events)
        except ProtocolError as error:
            self.drop(str(error))

    def drop(self, reason: str) -> None:
        """Closes a connection that does not keep to the protocol, and counts it."""
        self._server.dropped += 1
        logger.warning("dropped a connection of rank %s: %s", self._rank, reason)
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self)
        if self._rank is not None:
            self._server.lost(self._rank, self)
            self._rank = None

    def send(self, *messages: dict[str, Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(map(self._codec.encode, messages)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _events(self, message: Any) -> list[Event]:
        """Decodes a message into an event; handles hello and store requests itself."""
        kind = message.get("type") if isinstance(message, dict) else None
        if self._rank is None:
            rank = message.get("rank") if kind == "Hello" else None
            if type(rank) is not int or not self._server.admit(rank, self):
                raise ProtocolError(
                    f"expected a Hello of a new rank, got {brief(message)}"
                )
            self._rank = rank
        elif kind == "StoreSet":
            key, value = message.get("key"), message.get("value")
            if not isinstance(key, str) or not isinstance(value, bytes):
                raise ProtocolError("expected StoreSet with a key and bytes")
            self._server.store_set(key, value)
        elif kind == "StoreGet":
            self._server.store_get(str(message.get("key")), self)
        elif kind == "Beat":
            stack = str(message.get("stack"))[:STACK_CHARS]
            self._server.beat(self._rank, stack, waits=bool(message.get("waits")))
        else:
            event = from_wire(message, FROM_WORKERS)
            if event.rank != self._rank:
                raise ProtocolError(f"rank {self._rank} speaks for rank {event.rank}")
            if isinstance(event, Left):
                self._server.release(self._rank)
                self._rank = None
            return [event]
        return []


def rank_environments(
    world_size: int,
    address: tuple[str, int],
    key: bytes,
    ranks: range | None = None,
    node_rank: int = 0,
) -> list[dict[str, str]]:
    """Who each rank is, in torchrun's words, and where the coordinator is.

    Args:
        world_size: ranks of the run.
        address: of the coordinator.
        key: the run's secret.
        ranks: those of this host; None: all.
        node_rank: this host's place among the hosts.
    """
    ranks = range(world_size) if ranks is None else ranks
    return [
        {
            "ELCHE_COORDINATOR": format_address(*address),
            "ELCHE_KEY": key.hex(),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GROUP_RANK": str(node_rank),
        }
        for place, rank in enumerate(ranks)
    ]


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
        joining = {**environments[0], "ELCHE_JOINS": "1"}
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
        server.write_story(Path(os.environ[STORY]))


if __name__ == "__main__":
    asyncio.run(
        _serve_beside_rank_0(
            int(sys.argv[1]), sys.argv[2], bytes.fromhex(os.environ["ELCHE_KEY"])
        )
    )
