"""The coordinator's server: the loop around the pure core.

It reads frames, passes events to `elche.coordination.state.Coordinator`, and sends the
resulting instructions. It runs in a process of its own
(`elche.runtime.coordinator_process`), never in a training process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, final

from elche.comm.control.addresses import keep_alive
from elche.comm.control.frames import HELLO_BYTES, HELLO_WITHIN_S, accept
from elche.coordination.journal import Entry, RunRecord
from elche.coordination.liveness import SILENT_S, Liveness
from elche.coordination.protocol.events import (
    Event,
    Failed,
    Input,
    Join,
    Left,
    RankLost,
    StoreSet,
    StreamBegun,
    Tick,
)
from elche.coordination.protocol.instructions import Abort, Instruction
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.protocol.outbox import ACK_EVERY
from elche.coordination.protocol.wire import FROM_WORKERS, brief, from_wire, to_wire
from elche.errors import ProtocolError
from elche.runtime.process.launcher_watch import process_state

logger = logging.getLogger(__name__)

TICK_S = 0.5
STALLED_S = 10.0
"""Wait (s) for ranks before a log line names them; doubles with each line."""
GONE_S = 1.0
"""Grace (s) for a process's exit code after its connection has closed."""
STACK_CHARS: Final = 2000
_NO_EVENT = StoreSet, StreamBegun


class CoordinatorServer:
    """Serves one run.

    Args:
        world_size: ranks of the run.
        key: the run's shared secret.
        survives: lost ranks are fenced, so the run can continue without them.
        record: record of the run so far; None at its begin.

    Attributes:
        core: the decisions.
        record: state that a restarted coordinator needs.
        on_entries: called with journal entries, before their instructions are sent.
        on_change: called when ranks connect, are lost, or receive an `Abort`.
        sees_ends: a launcher reports the end of each process.
        on_lost: called with a lost rank that the run survives, before the others are
            notified: its process must be ended.
        on_message: called with each event and instruction, in their order.
        drops: number of dropped connections.
        strangers: connections without a Hello yet, with their start times.
        connections: connections of ranks, by rank.
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
        self._clock_s = 0.0  # offset of the run's clock from this host's
        self._liveness = Liveness(TICK_S)
        self._fenced: set[int] = set()
        self._patience_s = STALLED_S
        self.on_lost: Callable[[int], None] = lambda rank: None
        self.strangers: dict[RankConnection, float] = {}
        self._key = key
        self.connections: dict[int, RankConnection] = {}
        self._pids: dict[int, int] = {}
        self._waiting: dict[str, set[RankConnection]] = defaultdict(set)
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.on_message: Callable[[Event | Instruction], None] | None = None
        self.drops = 0
        self.has_admitted = False
        self.sees_ends = True
        self.aborted_by_others: set[int] = set()  # because of another rank, or of none

    async def start(self, listener: socket.socket) -> tuple[str, int]:
        """Starts serving connections on a socket; returns its address."""
        loop = asyncio.get_running_loop()
        self._clock_s = self.record.clock_s(time.time(), loop.time())
        self._server = await loop.create_server(
            lambda: RankConnection(self, self._key), sock=listener
        )
        self._ticker = loop.create_task(self._tick())
        host, port, *_ = listener.getsockname()
        return str(host), int(port)

    async def stop(self) -> None:
        """Closes every connection and the port."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._server is not None:
            self._server.close()
        for connection in (*self.connections.values(), *self.strangers):
            connection.close()
        await asyncio.sleep(0)

    def take(self, *events: Input) -> None:
        """Applies events to the core and sends its instructions.

        The instructions to one rank are sent in one piece, so that it wakes up once.
        """
        self.take_from(None, None, events)

    def take_from(
        self,
        source: int | None,
        connection: RankConnection | None,
        inputs: Sequence[Input | None],
    ) -> None:
        """Applies inputs of a rank's stream, or of the launcher's.

        Args:
            source: see `Entry`.
            connection: connection of the rank.
            inputs: events; None requests an `Ack`.
        """
        now_s = asyncio.get_running_loop().time() + self._clock_s
        replies: dict[int, list[Instruction]] = defaultdict(list)
        entries = [Entry(source, what, now_s) for what in inputs if what is not None]
        for entry in entries:
            what = entry.what
            if self.on_message and not isinstance(what, _NO_EVENT):
                self.on_message(what)
            for instruction in self.record.apply(entry):
                if self.on_message:
                    self.on_message(instruction)
                replies[instruction.rank].append(instruction)
            if isinstance(what, Failed) and what.rank not in self.core.members:
                refused = what.rank, what.error
                logger.warning("rank %d did not join the run: %s", *refused)
        if entries:
            self.on_entries(entries)
        self.fence_lost()
        for rank, instructions in replies.items():
            self._deliver(rank, instructions)
        for entry in entries:
            if isinstance(entry.what, StoreSet):
                for waiting in self._waiting.pop(entry.what.key, set()):
                    waiting.send_value(entry.what.key, entry.what.value)
        stream = None if source is None else self.record.streams.get(source)
        if connection is None or stream is None:
            return
        if None in inputs or stream.taken - stream.acknowledged >= ACK_EVERY:
            stream.acknowledged = stream.taken
            connection.send({"type": "Ack", "taken": stream.taken})

    def fence_lost(self) -> None:
        """Has each lost rank's process ended, once."""
        for rank in self.core.lost - self._fenced:
            self._fenced.add(rank)
            self._liveness.forget(rank)
            self.on_lost(rank)

    def beat(self, rank: int, stack: str, *, waits: bool) -> None:
        """Records a rank's heartbeat; see `Liveness.beat`."""
        if rank not in self._fenced:
            self._liveness.beat(rank, stack, waits=waits)

    def admit(
        self, connection: RankConnection, rank: int, pid: int, stream: str, had: int
    ) -> bool:
        """Registers a connection by its `Hello`: rank, and position in its stream.

        A rank that connects after the end of the run gets the reason at once, since it
        may only wait (like a rank of a pipeline until its group exists).

        Args:
            connection: connection of the rank.
            rank: its number.
            pid: id of its process; 0 on another host.
            stream: the stream's name; "" of a rank that cannot reconnect.
            had: number of the stream's instructions that the rank has received.

        Returns:
            True for a new rank, or one that reconnects; else False.
        """
        if not self.record.expects(rank) or rank in self.connections:
            return False
        self.strangers.pop(connection, None)
        self.connections[rank], self._pids[rank] = connection, pid
        self.has_admitted = True
        if stream:
            self._resume(connection, rank, stream, had)
        elif self.record.end is not None:
            self._deliver(rank, [replace(self.record.end, rank=rank)])
        self.on_change()
        return True

    def _resume(
        self, connection: RankConnection, rank: int, name: str, had: int
    ) -> None:
        """Resumes a rank's stream at its current position."""
        stream = self.record.streams.get(rank)
        if stream is not None and stream.name == name:
            stream.pending.acknowledge(had)
            lacks = map(to_wire, stream.pending.rest())
            resumed = {"type": "Resumed", "taken": stream.taken}
            connection.send(resumed, *lacks)
        else:
            connection.send({"type": "Resumed", "taken": 0})
            self.take(StreamBegun(rank, name))

    def release(self, rank: int) -> None:
        """Unregisters a rank that leaves; it may reconnect for another run."""
        self._liveness.forget(rank)
        self.connections.pop(rank, None)
        self.on_change()

    def lost(self, rank: int, connection: RankConnection) -> None:
        """Handles the end of a rank's connection."""
        if self.connections.get(rank) is connection:
            self.release(rank)
            if self.sees_ends and self.core.survives(rank):
                # Killed (a death) or ended by itself: the exit code distinguishes them.
                loop = asyncio.get_running_loop()
                loop.call_later(GONE_S, self.take, RankLost(rank=rank))
            else:
                self.take(RankLost(rank=rank))

    def store_get(self, key: str, connection: RankConnection) -> None:
        """Sends a value now, or as soon as it is published."""
        if key in self.record.store:
            connection.send_value(key, self.record.store[key])
        else:
            self._waiting[key].add(connection)

    def _deliver(self, rank: int, instructions: Sequence[Instruction]) -> None:
        connection = self.connections.get(rank)
        if connection is None:
            return
        connection.send(*map(to_wire, instructions))
        aborts = (i for i in instructions if isinstance(i, Abort))
        if any(abort.failed_rank != rank for abort in aborts):
            self.aborted_by_others.add(rank)
            self.on_change()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = asyncio.get_running_loop().time()
            for stranger, since_s in list(self.strangers.items()):
                if now_s - since_s > HELLO_WITHIN_S:
                    stranger.drop("no Hello came")
            silent = self._silent()
            self.take(Tick(), *(RankLost(rank=r, silent_s=SILENT_S) for r in silent))
            self._log_stalled(now_s + self._clock_s)

    def _silent(self) -> list[int]:
        """Ranks that are silent for too long and whose processes are stopped."""
        stopped = []
        for rank in self._liveness.tick():
            if process_state(self._pids[rank]) not in ("", *"?TtXZ"):
                self._liveness.runs(rank)
                continue
            stopped.append(rank)
            if self.core.aborted is None:
                survives = self.core.survives(rank)
                comes = "elche has ended it" if survives else "training waits"
                or_busy = "" if self._pids[rank] else "in a call into C code, "
                logger.warning(
                    "rank %d has been silent for %g s, and %s: it is stopped, %sor the "
                    "link to it is cut",
                    *(rank, SILENT_S, comes, or_busy),
                )
        return stopped

    def _log_stalled(self, now_s: float) -> None:
        """Logs the ranks that others have been waiting for too long."""
        since_s, late = self.core.waiting_since_s, self._liveness.late()
        if late and since_s is not None and now_s - since_s >= self._patience_s:
            replies = self.core.doing, self._patience_s, late
            logger.warning("the run has been %s for %g s: %s", *replies)
            self._patience_s *= 2


@final
class RankConnection(asyncio.Protocol):
    """One rank's connection, as the server sees it.

    Args:
        server: receives the rank's messages.
        key: the run's secret.
    """

    def __init__(self, server: CoordinatorServer, key: bytes) -> None:
        self._server = server
        self._greeting, self._codec = accept(key)
        self._transport: asyncio.Transport | None = None
        self._rank: int | None = None
        self._source: int | None = None  # stays when the rank has left
        self._unknown_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the greeting with a nonce, which identifies a coordinator."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        self._server.strangers[self] = asyncio.get_running_loop().time()
        transport.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        """Passes complete messages to the server; invalid ones end the connection."""
        self._unknown_bytes += len(data) if self._rank is None else 0
        if self._unknown_bytes > HELLO_BYTES:
            self.drop("expected a Hello, got more bytes than it has")
            return
        inputs: list[Input | None] = []
        source, error = self._source, None
        try:
            for message in self._codec.feed(data):
                inputs += self._inputs(message)
                source = self._source
        except ProtocolError as found:
            error = found
        if inputs:
            self._server.take_from(source, self, inputs)
        if error is not None:
            self.drop(str(error))

    def drop(self, reason: str) -> None:
        """Closes a connection that violates the protocol, and counts it."""
        self._server.drops = drops = self._server.drops + 1
        # Of strangers the first, second, fourth, ...: one cannot fill the disk.
        if self._rank is not None or drops.bit_count() == 1:
            so_far = f" ({drops} so far)" if drops > 1 else ""
            dropped = self._rank, reason, so_far
            logger.warning("dropped a connection of rank %s: %s%s", *dropped)
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregisters the connection: its rank may reconnect, be dead, or have left."""
        self._server.strangers.pop(self, None)
        if self._rank is not None:
            self._server.lost(self._rank, self)
            self._rank = None

    def send(self, *messages: dict[str, Any]) -> None:
        """Sends messages in one piece, if the connection is open."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(map(self._codec.encode, messages)))

    def send_value(self, key: str, value: bytes) -> None:
        """Answers a request to the store."""
        self.send({"type": "StoreValue", "key": key, "value": value})

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.close()

    def _inputs(self, message: Any) -> list[Input | None]:
        """Decodes a message into an input; handles hello and store requests itself."""
        kind = message.get("type") if isinstance(message, dict) else None
        if kind == "Flush" and self._source is not None:
            return [None]
        if self._rank is None:
            hello = self._hello_of(message) if kind == "Hello" else None
            if hello is None or not self._server.admit(self, *hello):
                raise ProtocolError(
                    f"expected a Hello of a new rank, got {brief(message)}"
                )
            self._rank = self._source = hello[0]
        elif kind == "StoreSet":
            key, value = message.get("key"), message.get("value")
            if not isinstance(key, str) or not isinstance(value, bytes):
                raise ProtocolError("expected StoreSet with a key and bytes")
            return [StoreSet(key, value)]
        elif kind == "Ack":
            received = message.get("received")
            if type(received) is not int:
                raise ProtocolError(f"expected Ack with a number, got {brief(message)}")
            if (stream := self._server.record.streams.get(self._rank)) is not None:
                stream.pending.acknowledge(received)
        elif kind == "StoreGet":
            self._server.store_get(str(message.get("key")), self)
        elif kind == "Beat":
            stack = str(message.get("stack"))[:STACK_CHARS]
            self._server.beat(self._rank, stack, waits=bool(message.get("waits")))
        elif kind == "Join" and message.get("version") != PROTOCOL_VERSION:
            # Refused for its version, not for a field that it has or lacks.
            version = message.get("version")
            return [
                Join(
                    rank=self._rank,
                    version=version if type(version) is int else 0,
                    world_size=0,
                    settings=(),
                    tensors=(),
                    device="",
                    horizon_batches=0,
                )
            ]
        else:
            event = from_wire(message, FROM_WORKERS)
            if event.rank != self._rank:
                raise ProtocolError(f"rank {self._rank} sends as rank {event.rank}")
            if isinstance(event, Left):
                self._server.release(self._rank)
                self._rank = None
            return [event]
        return []

    def _hello_of(self, message: dict[str, Any]) -> tuple[int, int, str, int] | None:
        """Rank, process id, stream and instructions received; None if malformed."""
        rank, stream = message.get("rank"), message.get("stream", "")
        pid, received = message.get("pid", 0), message.get("received", 0)
        assert self._transport is not None
        ends = map(self._transport.get_extra_info, ("peername", "sockname"))
        hosts = {end[0] for end in ends if end}
        if not type(rank) is type(pid) is type(received) is int:
            return None
        return rank, pid if len(hosts) == 1 else 0, str(stream), received
