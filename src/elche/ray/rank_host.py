"""The actor of a rank: it starts the rank's process on the node where Ray placed it.

A process of its own has signals, an exit code and a main thread as under `elche run`,
and the same code watches it. It ends with the actor, and the actor with its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Final, final

import ray
from ray.util import get_node_ip_address

from elche.runtime.process.local_ranks import inherited_environment

MAIN: Final = "elche.launching.remote_rank"
RESULT_S: Final = 5.0
"""Deadline (s) to read the result of a process that has ended."""


@final
class RankHost:
    """Starts, signals and awaits a place's processes, one at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Future[bytes] | None = None

    async def start(
        self, command: tuple[str, ...], call: bytes, environment: dict[str, str]
    ) -> None:
        """Starts a rank's process.

        Args:
            command: a script and its arguments; () calls a function.
            call: the function and its arguments, pickled.
            environment: variables of the rank.
        """
        here = {
            **inherited_environment(1),
            "ELCHE_LISTEN": get_node_ip_address(),
            "ELCHE_HOST": ray.get_runtime_context().get_node_id(),
            "LOCAL_RANK": "0",  # Ray shows a rank its own devices alone
            "LOCAL_WORLD_SIZE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
        }
        ours, theirs = socket.socketpair()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MAIN),
            *(str(theirs.fileno()), str(os.getpid()), *command),
            env=here | environment,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(call)
        writer.write_eof()
        self._reading = asyncio.ensure_future(_read(reader, writer))

    async def wait(self) -> tuple[int, bytes]:
        """Exit code of the process (negative for a signal), and its result."""
        assert self._process is not None
        assert self._reading is not None
        code = await self._process.wait()
        # Processes that it left behind may hold the socket open.
        await asyncio.wait([self._reading], timeout=RESULT_S)
        return code, self._reading.result() if self._reading.done() else b""

    async def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it has not ended."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.Signals(number))


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""
