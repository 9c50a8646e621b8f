"""Rendezvous for the user's `init_process_group()` without a URL.

torch's store listens on every interface unless it gets a listening socket. Importing
torch takes seconds, and most launchers do not need it. So the launcher opens a socket
on loopback and starts the store on it when a client connects.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, final

from elche.comm.control.addresses import listen

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"


@final
class TorchStore:
    """A store for torch's process groups, open to every process that reaches it.

    elche's own groups use the coordinator for rendezvous instead.

    Args:
        host: address of this host that the store listens on.

    Attributes:
        is_used: True once a client has connected.
    """

    def __init__(self, host: str = HOST) -> None:
        self.is_used = False
        self._host = host
        self._listener = listen(host, 0)
        self._port = int(self._listener.getsockname()[1])
        self._serving: asyncio.Task[Any] | None = None
        asyncio.get_running_loop().add_reader(self._listener, self._serve)

    def environment(self) -> dict[str, str]:
        """Returns environment variables that make torch use this store."""
        return {
            "MASTER_ADDR": self._host,
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
            self._serving = None  # the task held the store

    def _serve(self) -> None:
        """Starts the store for the first client, importing torch in a thread."""
        self.is_used = True
        asyncio.get_running_loop().remove_reader(self._listener)
        starting = asyncio.to_thread(
            _store_on, self._host, self._listener.detach(), self._port
        )
        self._serving = asyncio.ensure_future(starting)
        self._serving.add_done_callback(_log_failure)


def _store_on(host: str, descriptor: int, port: int) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


def _log_failure(serving: asyncio.Task[Any]) -> None:
    if (error := serving.exception()) is not None:
        logger.error("torch's rendezvous at MASTER_PORT cannot be served: %s", error)
