"""Ranks as processes of this machine, and their output.

Output is passed through, read line by line, or printed above a display.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import final

from elche.comm.control.addresses import listen
from elche.runtime.process.launch_config import LaunchConfig
from elche.runtime.process.launchers import LAUNCH
from elche.runtime.process.rank_processes import RankProcess

LOOPBACK = "127.0.0.1"
READ_BYTES = 1 << 16
LAST_LINES_S = 5.0
"""Deadline (s) to read the rest of the output after the ranks have ended."""
OF_A_RANK = "ELCHE_SPEED", "ELCHE_DEVICE", LAUNCH


@final
class LocalRanks:
    """Starts the ranks of one launch; see `RankBackend`.

    Args:
        config: configuration of the launch.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._pipe = os.pipe()  # this process alone has the end that it holds
        self.pipe = self._pipe[0]
        self._readers: dict[asyncio.Task[None], asyncio.ReadTransport] = {}

    def listen(self) -> socket.socket:
        """See `RankBackend`."""
        network = self._config.network
        return listen(LOOPBACK, 0) if network is None else network.listener()

    async def start(
        self, rank: int, place: int, environment: dict[str, str]
    ) -> RankProcess:
        """See `RankBackend`."""
        config, network = self._config, self._config.network
        world_size = config.world_size
        own = inherited_environment(max(1, (os.cpu_count() or 1) // world_size))
        own |= environment
        own |= {"LOCAL_RANK": str(place), "LOCAL_WORLD_SIZE": str(world_size)}
        if network is not None:
            own |= network.environment(place)
        if config.display is not None:  # a pipe that is shown on a terminal
            own.setdefault("PYTHONUNBUFFERED", "1")
        if config.start is not None:
            return config.start(rank, own)
        stdout, stderr = await self._open_output(rank)
        try:
            return await asyncio.create_subprocess_exec(
                *(() if network is None else network.command(place)),
                *config.command,
                env=own,
                pass_fds=(self.pipe,),
                stdout=stdout,
                stderr=stderr,
            )
        finally:
            for end in (stdout, stderr):
                if end is not None:
                    os.close(end)

    async def _open_output(self, rank: int) -> list[int | None]:
        """Opens a rank's standard output and error, None: the launcher's own.

        No pipes of `create_subprocess_exec`: its process may not count as ended while
        a child holds one (Python 3.11).
        """
        config, display = self._config, self._config.display
        shown = None if display is None else display.print_line
        on_line = shown if display and sys.stdout.isatty() else None
        if config.on_line is not None:
            on_line = partial(config.on_line, rank)
        ends: list[int | None] = [None, None]
        for number, take in enumerate((on_line, shown)):
            if take is not None:
                ours, ends[number] = os.pipe()
                stream = asyncio.StreamReader()
                transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                    partial(asyncio.StreamReaderProtocol, stream), os.fdopen(ours, "rb")
                )
                self._readers[asyncio.ensure_future(pass_on(stream, take))] = transport
        return ends

    async def fence(self, process: RankProcess) -> None:
        """Kills a process.

        Not by ``send_signal``, which polls the process and would take its exit code
        from the waiting task.
        """
        if process.pid is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def end_waiting(self) -> None:
        """Does nothing: no rank waits for this machine."""

    async def close(self) -> None:
        """Reads the remaining output after the ranks' end, and removes the view."""
        if self._readers:  # a process that a rank has left behind may hold a pipe open
            _, late = await asyncio.wait(self._readers, timeout=LAST_LINES_S)
            for reader in late:
                self._readers[reader].close()  # it ends, with the rest of a line
            await asyncio.gather(*self._readers)  # raises what `on_line` has
        if self._config.display is not None:
            self._config.display.close()
        for end in self._pipe:
            os.close(end)


def inherited_environment(threads: int) -> dict[str, str]:
    """This process's environment, without an outer launcher's rank variables.

    Args:
        threads: threads of a rank, unless the environment sets them.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        **{
            name: value
            for name, value in os.environ.items()
            if name not in OF_A_RANK and not name.startswith("TORCHELASTIC_")
        },
    }


async def pass_on(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """Passes on lines as they arrive; of an overwritten line (a bar) the last state."""
    rest = ""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while piece := await stream.read(READ_BYTES):
        *lines, rest = (rest + decoder.decode(piece)).split("\n")
        for line in lines:
            take(_last_shown(line))
        rest = rest[max(0, rest.rstrip("\r").rfind("\r")) :]
    if rest:
        take(_last_shown(rest))


def _last_shown(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]
