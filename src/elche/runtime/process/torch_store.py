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
import os
import socket
import sys
from typing import Any, Final, final

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
HELLO: Final = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder)
"""First bytes that a client of a TCPStore sends (torch 2.8 to 2.13)."""
HELLO_S = 10.0
GONE: Final = OSError, EOFError, asyncio.TimeoutError


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
        self._port = int(self._listener.getsockname()[1])
        self._descriptor = os.dup(self._listener.fileno())  # of the store
        self._serving: asyncio.Task[Any] | None = None
        listening = asyncio.start_server(self._meet, sock=self._listener)
        self._server = asyncio.ensure_future(listening)

    def environment(self) -> dict[str, str]:
        """Environment variables that make torch use this store."""
        return {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    async def close(self) -> None:
        """Ends the store and the socket."""
        (await self._server).close()
        if self._serving is None:
            os.close(self._descriptor)
        else:
            await asyncio.wait([self._serving])
            self._serving = None  # with it goes the store

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One that came before there was a store: what it says is passed on to that."""
        with contextlib.closing(writer), contextlib.suppress(*GONE):
            said = await asyncio.wait_for(reader.readexactly(len(HELLO)), HELLO_S)
            if said != HELLO:
                return
            self.is_used = True
            if self._serving is None:
                self._server.result().close()
                self._serving = asyncio.ensure_future(
                    asyncio.to_thread(_store_on, self._descriptor, self._port)
                )
                self._serving.add_done_callback(_say_failure)
            await asyncio.wait([self._serving])
            store, to_store = await asyncio.open_connection(HOST, self._port)
            to_store.write(HELLO)
            await asyncio.gather(_pass_on(reader, to_store), _pass_on(store, writer))


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
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.close()


def _say_failure(serving: asyncio.Task[Any]) -> None:
    if (error := serving.exception()) is not None:
        logger.error("torch's rendezvous at MASTER_PORT cannot be served: %s", error)
