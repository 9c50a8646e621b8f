"""Start of the other hosts' launchers from the first one, over ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from elche.errors import ConfigError

SSH: Final = "ELCHE_SSH"
"""The command that runs another on a host, in place of ssh."""
DEFAULT_SSH: Final = "ssh -o BatchMode=yes"
END_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStart:
    """Hosts whose launchers are started from here.

    Attributes:
        own_ranks: of this host.
        others: name and ranks of each other host, in the order of their node ranks.
        words: what each runs: the script and its arguments.
    """

    own_ranks: int
    others: tuple[tuple[str, int], ...]
    words: tuple[str, ...]

    @staticmethod
    def read(text: str, words: Sequence[str]) -> RemoteStart:
        """Reads ``a:2,b:4``; this host is the first.

        Raises:
            ConfigError: it is malformed, or names one host alone.
        """
        found = []
        for part in text.split(","):
            host, _, count = part.strip().rpartition(":")
            # A name that began with a dash would be an option of ssh.
            if not host or host.startswith("-") or not count.isdigit() or count == "0":
                raise ConfigError(
                    f"expected --hosts like a:2,b:4 (host:ranks, this one first), got "
                    f"{text!r}"
                )
            found.append((host, int(count)))
        if len(found) < 2:
            raise ConfigError(f"expected --hosts of at least two hosts, got {text!r}")
        return RemoteStart(
            own_ranks=found[0][1], others=tuple(found[1:]), words=tuple(words)
        )

    def command(self, node_rank: int, meeting: str) -> tuple[str, ...]:
        """What starts a host's launcher, in this folder and by this interpreter.

        Its key comes on standard input: a process's words are read by everybody.
        """
        host, ranks = self.others[node_rank - 1]
        launcher = [sys.executable, "-m", "elche", "run"]
        launcher += ["--nnodes", str(len(self.others) + 1)]
        launcher += ["--node-rank", str(node_rank), "--rendezvous", meeting]
        launcher += ["--key-file", "-", "--nproc", str(ranks), *self.words]
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(launcher)}"
        return (*shlex.split(os.environ.get(SSH, DEFAULT_SSH)), host, there)


@final
class RemoteLaunchers:
    """The processes, here, that run the other hosts' launchers.

    Args:
        start: which hosts.
        on_end: called with the name of a host and a code where one has ended.
    """

    def __init__(self, start: RemoteStart, on_end: Callable[[str, int], None]) -> None:
        self._start = start
        self._on_end = on_end
        self._processes: list[asyncio.subprocess.Process] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def begin(self, meeting: str, key: bytes) -> None:
        """Starts them all.

        Raises:
            ConfigError: there is no ssh.
        """
        for place, (host, _) in enumerate(self._start.others):
            words = self._start.command(place + 1, meeting)
            try:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=asyncio.subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                raise ConfigError(f"cannot start {words[0]!r}: {error}") from error
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(f"{key.hex()}\n".encode())
            process.stdin.close()
            watching = self._watch(host, process)
            self._watchers.append(asyncio.ensure_future(watching))

    async def end(self) -> None:
        """Waits a moment for their end, and ends them then."""
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=END_S)
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if self._watchers:
            await asyncio.wait(self._watchers)

    async def _watch(self, host: str, process: asyncio.subprocess.Process) -> None:
        self._on_end(host, await process.wait())
