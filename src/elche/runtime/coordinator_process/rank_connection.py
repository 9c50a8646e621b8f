"""The connection of a rank to the coordinator: hello, stream and store requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from elche.comm.control.addresses import keep_alive
from elche.comm.control.drop_log import DropLog
from elche.comm.control.frames import HELLO_BYTES, accept
from elche.coordination.protocol.events import Input, Join, Left, StoreSet
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.protocol.wire import FROM_WORKERS, brief, from_wire
from elche.errors import ProtocolError

STACK_CHARS: Final = 2000


@dataclass(frozen=True, slots=True)
class Hello:
    """Identity of a connection.

    Attributes:
        rank: which.
        pid: of its process; 0 where that is on another host.
        stream: name of its stream, of which it has ``received`` instructions; "" where
            it cannot come again.
    """

    rank: int
    pid: int
    stream: str
    received: int


class ConnectionServer(Protocol):
    """The server of the connections, as these use it.

    Attributes:
        drops: connections that kept to no protocol.
    """

    drops: DropLog

    def meet(self, connection: RankConnection) -> None:
        """A connection was made."""

    def forget(self, connection: RankConnection) -> None:
        """A connection has ended."""

    def take_from(
        self,
        source: int | None,
        connection: RankConnection | None,
        inputs: Sequence[Input | None],
    ) -> None:
        """Takes what a rank has sent."""

    def admit(self, hello: Hello, connection: RankConnection) -> bool:
        """True if this is a new rank, or one that comes again."""

    def acknowledge(self, rank: int, received: int) -> None:
        """A rank has so many instructions of its stream."""

    def store_get(self, key: str, connection: RankConnection) -> None:
        """Answers with a value now or as soon as it is published."""

    def beat(self, rank: int, stack: str, *, waits: bool) -> None:
        """A rank lives."""

    def release(self, rank: int) -> None:
        """A rank leaves."""

    def lost(self, rank: int, connection: RankConnection) -> None:
        """A rank's connection has ended."""


@final
class RankConnection(asyncio.Protocol):
    """One rank's connection, as the server sees it.

    Args:
        server: takes what comes.
        key: the run's secret.
    """

    def __init__(self, server: ConnectionServer, key: bytes) -> None:
        self._server = server
        self._greeting, self._codec = accept(key)
        self._transport: asyncio.Transport | None = None
        self._rank: int | None = None
        self._source: int | None = None  # stays when the rank has left
        self._unknown_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Says by its nonce that this is a coordinator."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        self._server.meet(self)
        transport.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        """Hands what is whole to the server; drops who keeps to no protocol."""
        self._unknown_bytes += len(data) if self._rank is None else 0
        if self._unknown_bytes > HELLO_BYTES:
            self.drop("expected a Hello, got a flood")
            return
        inputs: list[Input | None] = []
        source = self._source
        try:
            try:
                for message in self._codec.feed(data):
                    inputs += self._inputs(message)
                    source = self._source
            finally:
                if inputs:
                    self._server.take_from(source, self, inputs)
        except ProtocolError as error:
            self.drop(str(error))

    def drop(self, reason: str) -> None:
        """Closes a connection that does not keep to the protocol, and counts it."""
        whose, is_known = f"a connection of rank {self._rank}", self._rank is not None
        self._server.drops.add(whose, reason, is_known=is_known)
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The rank may come again, be dead, or have left."""
        self._server.forget(self)
        if self._rank is not None:
            self._server.lost(self._rank, self)
            self._rank = None

    def send(self, *messages: dict[str, Any]) -> None:
        """Sends messages in one piece, if the connection stands."""
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
            if hello is None or not self._server.admit(hello, self):
                raise ProtocolError(
                    f"expected a Hello of a new rank, got {brief(message)}"
                )
            self._rank = self._source = hello.rank
        elif kind == "StoreSet":
            key, value = message.get("key"), message.get("value")
            if not isinstance(key, str) or not isinstance(value, bytes):
                raise ProtocolError("expected StoreSet with a key and bytes")
            return [StoreSet(key, value)]
        elif kind == "Ack":
            received = message.get("received")
            if type(received) is not int:
                raise ProtocolError(f"expected Ack with a number, got {brief(message)}")
            self._server.acknowledge(self._rank, received)
        elif kind == "StoreGet":
            self._server.store_get(str(message.get("key")), self)
        elif kind == "Beat":
            stack = str(message.get("stack"))[:STACK_CHARS]
            self._server.beat(self._rank, stack, waits=bool(message.get("waits")))
        elif kind == "Join" and message.get("version") != PROTOCOL_VERSION:
            return [_of_another_version(self._rank, message.get("version"))]
        else:
            event = from_wire(message, FROM_WORKERS)
            if event.rank != self._rank:
                raise ProtocolError(f"rank {self._rank} speaks for rank {event.rank}")
            if isinstance(event, Left):
                self._server.release(self._rank)
                self._rank = None
            return [event]
        return []

    def _hello_of(self, message: dict[str, Any]) -> Hello | None:
        """Contents of a Hello; None for another message."""
        rank, stream = message.get("rank"), message.get("stream", "")
        pid, received = message.get("pid", 0), message.get("received", 0)
        assert self._transport is not None
        ends = map(self._transport.get_extra_info, ("peername", "sockname"))
        hosts = {end[0] for end in ends if end}
        if not type(rank) is type(pid) is type(received) is int:
            return None
        return Hello(rank, pid if len(hosts) == 1 else 0, str(stream), received)


def _of_another_version(rank: int, version: object) -> Join:
    """Has a rank refused for its version, not for a field that it has or lacks."""
    return Join(
        rank=rank,
        version=version if type(version) is int else 0,
        world_size=0,
        settings=(),
        tensors=(),
        device="",
        horizon_batches=0,
    )
