"""torch's own rendezvous in a run of ours: `init_process_group()` without a URL.

torch's store takes every interface unless it is handed a listening socket, and to
import torch costs seconds that most launchers need not spend. So the launcher holds a
socket on loopback, and the store comes to be behind it when somebody speaks to it as
torch does: a port scan does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from typing import Any, Final, final

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
HELLO: Final = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder)
"""First bytes that a client of a TCPStore sends (torch 2.8 to 2.13)."""
HELLO_S = 10.0
PIECE_BYTES = 1 << 16


@final
class TorchStore:
    """A store for torch's process groups, on loopback, open to every process there.

    elche's own groups meet at the coordinator instead.

    Attributes:
        is_used: a client of such a store has come.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._listener = socket.create_server((HOST, 0))
        self._listener.setblocking(False)
        self._port = int(self._listener.getsockname()[1])
        self._serving: asyncio.Task[Any] | None = None
        self._clients: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def environment(self) -> dict[str, str]:
        """What sends torch there, and tells rank 0 not to host a store itself."""
        return {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    async def close(self) -> None:
        """Ends the store and the socket."""
        for client in self._clients:
            client.cancel()
        if self._serving is None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        else:
            await asyncio.wait([self._serving])
            self._serving = None  # with it goes the store

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection, _ = self._listener.accept()
            client = asyncio.ensure_future(self._meet(connection))
            self._clients.add(client)
            client.add_done_callback(self._clients.discard)

    async def _meet(self, connection: socket.socket) -> None:
        """One that came before there was a store: what it says is passed on to that."""
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_connection(sock=connection)
            with contextlib.closing(writer):
                said = reader.readexactly(len(HELLO))
                if await asyncio.wait_for(said, HELLO_S) != HELLO:
                    return
                await asyncio.wait([self._serve()])
                store = await asyncio.open_connection(HOST, self._port)
                store[1].write(HELLO)
                await asyncio.gather(
                    _pass_on(reader, store[1]), _pass_on(store[0], writer)
                )

    def _serve(self) -> asyncio.Task[Any]:
        self.is_used = True
        if self._serving is None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._serving = asyncio.ensure_future(
                asyncio.to_thread(_store_on, self._listener.detach(), self._port)
            )
            self._serving.add_done_callback(_say_failure)
        return self._serving


def _store_on(descriptor: int, port: int) -> Any:
    """In a thread: the coordinator answers meanwhile, and who connected waits."""
    from torch.distributed import TCPStore

    return TCPStore(
        HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    writer.close()


def _say_failure(serving: asyncio.Task[Any]) -> None:
    if (error := serving.exception()) is not None:
        logger.error("torch's rendezvous at MASTER_PORT cannot be served: %s", error)
