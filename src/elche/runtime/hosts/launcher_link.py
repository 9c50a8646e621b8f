"""A launcher's connection to the one that leads its run, or to a witness."""

from __future__ import annotations

import asyncio
from typing import Any, Final, final

from elche.comm.control.addresses import outlive_cuts
from elche.comm.control.frames import GREETING_BYTES, FrameCodec, nonce_of
from elche.coordination.protocol.host_messages import FromHost
from elche.coordination.protocol.wire import FROM_LEADER, from_wire, to_wire

CONNECT_S: Final = 10.0
_CHUNK_BYTES: Final = 1 << 16


@final
class LauncherLink:
    """The connection to another launcher.

    Args:
        reader: of it.
        writer: to it.
        codec: of the connection.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        codec: FrameCodec,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._codec = codec
        self._unread: list[Any] = []

    @staticmethod
    async def connect(
        address: tuple[str, int], key: bytes, timeout_s: float = CONNECT_S
    ) -> LauncherLink:
        """Connects, and reads its greeting.

        Raises:
            OSError: nothing listens there.
            ProtocolError: something else than elche does.
        """
        opening = asyncio.open_connection(*address)
        reader, writer = await asyncio.wait_for(opening, timeout_s)
        outlive_cuts(writer.get_extra_info("socket"))
        reading = reader.readexactly(GREETING_BYTES)
        try:
            greeting = await asyncio.wait_for(reading, timeout_s)
            codec = FrameCodec(key, nonce_of(greeting), is_server=False)
        except BaseException:
            writer.close()
            raise
        return LauncherLink(reader, writer, codec)

    def send(self, message: FromHost) -> None:
        """Sends a message, if the connection is there."""
        if not self._writer.is_closing():
            self._writer.write(self._codec.encode(to_wire(message)))

    async def receive(self) -> list[Any]:
        """Messages that have come; none: the connection has ended.

        Raises:
            ProtocolError: they are not authentic.
        """
        if self._unread:
            found, self._unread = self._unread, []
            return found
        while True:
            try:
                data = await self._reader.read(_CHUNK_BYTES)
            except OSError:
                return []
            found = [from_wire(m, FROM_LEADER) for m in self._codec.feed(data)]
            if found or not data:
                return found

    def put_back(self, messages: list[Any]) -> None:
        """They come next."""
        self._unread = messages

    def close(self) -> None:
        """Ends the connection."""
        self._writer.close()

    def abort(self) -> None:
        """Ends it, with what is not sent."""
        self._writer.transport.abort()
