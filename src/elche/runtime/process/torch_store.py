"""torch's own rendezvous in a run of ours: `init_process_group()` without a URL.

torch's store takes every interface unless it is handed a listening socket, and to
import torch costs seconds that most launchers need not spend. So the launcher holds a
socket on loopback, and the store comes to be behind it when somebody connects.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, final

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
DEFAULT_GROUP = (
    "a script that meets in torch.distributed's own process group, whose others would "
    "wait for it"
)


@final
class TorchStore:
    """A store for torch's process groups, on loopback, open to every process there.

    elche's own groups meet at the coordinator instead.

    Attributes:
        is_used: somebody has connected.
        on_use: called when the first one does.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.on_use: Callable[[], None] = lambda: None
        self._listener = socket.create_server((HOST, 0))
        self._port = int(self._listener.getsockname()[1])
        self._serving: asyncio.Task[Any] | None = None
        asyncio.get_running_loop().add_reader(self._listener, self._serve)

    def environment(self) -> dict[str, str]:
        """What sends torch there, and tells rank 0 not to host a store itself."""
        return {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    async def close(self) -> None:
        """Ends the store and the socket."""
        if self._serving is None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        else:
            await asyncio.wait([self._serving])
            self._serving = None  # with it goes the store

    def _serve(self) -> None:
        self.is_used = True
        self.on_use()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._serving = asyncio.ensure_future(
            asyncio.to_thread(_store_on, self._listener.detach(), self._port)
        )
        self._serving.add_done_callback(_say_failure)


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


def _say_failure(serving: asyncio.Task[Any]) -> None:
    if (error := serving.exception()) is not None:
        logger.error("torch's rendezvous at MASTER_PORT cannot be served: %s", error)
