"""Launcher of a run's ranks on this machine, and of its coordinator.

When a rank fails, or the launcher is sent a signal, all ranks are notified through the
coordinator and end by themselves; what is still there after a while is terminated.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, final

from elche.comm.control.addresses import listen
from elche.comm.control.key_file import KEY_BYTES
from elche.comm.transport.torch_store import TorchStore
from elche.errors import ConfigError
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.process.launchers import LAUNCH, LaunchFacts, rank_environments
from elche.runtime.process.rank_output import LINE_BYTES, Display, RankOutput
from elche.runtime.process.rank_processes import RankProcess, RankProcesses
from elche.runtime.report.files import write_story
from elche.runtime.report.timeline import TRACE, join_parts

LOOPBACK = "127.0.0.1"
OF_A_RANK = "ELCHE_SPEED", "ELCHE_DEVICE", LAUNCH


class Network(Protocol):
    """Network of ranks and coordinator, as benchmarks emulate one."""

    def command(self, rank: int) -> tuple[str, ...]:
        """Prefix of a rank's command that runs it in its place."""

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that a rank needs there."""

    def listener(self) -> socket.socket:
        """A socket that listens where all ranks can reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Command, ranks and options of a launch.

    Attributes:
        command: the program and its arguments, the same on every rank.
        num_ranks: how many ranks, unless devices or speeds say it.
        devices: a device per rank, such as ``("cuda:0", "cpu")``.
        speeds: relative speeds of emulated devices, one per rank.
        ms_per_sample: an emulated device's time per sample at speed 1.
        fixed_ms: an emulated device's time per pass beside its samples'.
        environment: further variables for every rank.
        on_line: called with rank and text of each line that a rank prints, instead
            of passing the ranks' standard output on.
        network: where ranks and coordinator meet, if not on this host's loopback.
        story_path: file for what the ranks and the coordinator said and decided,
            written when the run ends, however it ends.
        start: starts a rank's process with this environment, in place of the command.
        trace_path: file for the timeline of all ranks, written then as well.
        display: shows the run, and what the ranks print, on this terminal.
        rejoin: how many ranks at most are started in place of some that have died, and
            join the run that goes on.
    """

    command: tuple[str, ...]
    num_ranks: int | None = None
    devices: tuple[str, ...] | None = None
    speeds: tuple[float, ...] | None = None
    ms_per_sample: float = 1.25
    fixed_ms: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    on_line: Callable[[int, str], None] | None = None
    network: Network | None = None
    story_path: Path | None = None
    start: Callable[[int, Mapping[str, str]], RankProcess] | None = None
    trace_path: Path | None = None
    display: Display | None = None
    rejoin: int = 0

    def __post_init__(self) -> None:
        given = sum(x is not None for x in (self.num_ranks, self.devices, self.speeds))
        if given > 1:
            raise ConfigError(
                f"expected one of --nproc, --devices and --speeds, got {given}"
            )
        if self.rejoin < 0:
            raise ConfigError(f"expected --rejoin from 0 on, got {self.rejoin}")
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigError(f"expected --nproc of at least 1, got {self.num_ranks}")
        for name, each in (
            *(("positive --speeds", speed) for speed in self.speeds or ()),
            ("a positive --ms-per-sample", self.ms_per_sample),
        ):
            if not 0 < each < math.inf:
                raise ConfigError(f"expected {name}, got {each!r}")
        if not 0 <= self.fixed_ms < math.inf:
            raise ConfigError(
                f"expected --fixed-ms of at least 0, got {self.fixed_ms!r}"
            )

    @property
    def world_size(self) -> int:
        """Ranks to start; every CUDA device of the machine when nothing is said."""
        if self.devices is not None:
            return len(self.devices)
        if self.speeds is not None:
            return len(self.speeds)
        return self.num_ranks if self.num_ranks is not None else _device_count()

    def device_names(self) -> tuple[str, ...] | None:
        """A device per rank, as ranks choose themselves; None for emulated ones."""
        if self.speeds is not None or self.devices is not None:
            return self.devices
        count = _device_count(without=0)
        ranks = range(self.world_size)
        return tuple(f"cuda:{rank % count}" if count else "cpu" for rank in ranks)


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """End of a run: exit codes and reason.

    Attributes:
        exit_codes: each rank's exit code; a signal counts as 128 + its number.
        reason: why the run was ended, "" if it was not.
        terminated: ranks that had to be ended here.
        failed_first: the rank that failed first, and not because of another.
        signal: what the launcher was sent to end the run; 0 if it was not.
        have_met: a rank came to the coordinator, or to torch's store.
        failed_s: when the first failure was seen, by the monotonic clock.
    """

    exit_codes: tuple[int, ...]
    reason: str
    terminated: tuple[int, ...]
    failed_first: int | None
    signal: int = 0
    have_met: bool = True
    failed_s: float | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of the run: by the signal, or of the rank that failed first."""
        if self.signal:
            return 128 + self.signal
        return 0 if self.failed_first is None else self.exit_codes[self.failed_first]


def launch(
    config: LaunchConfig,
    on_ready: Callable[[RankProcesses], None] = RankProcesses.handle_signals,
) -> LaunchResult:
    """Starts the ranks, serves them, and waits for their end.

    Args:
        config: what to start.
        on_ready: called in the event loop before the first rank is started.

    Raises:
        ConfigError: a device does not exist.
    """
    if config.devices is not None:
        from elche.runtime.process.environment import check_device

        for name in config.devices:
            check_device(name)
    return asyncio.run(_launch(config, on_ready))


async def _launch(
    config: LaunchConfig, on_ready: Callable[[RankProcesses], None]
) -> LaunchResult:
    run = _LaunchedRun(config)
    try:
        on_ready(run.processes)
        await run.run()
    finally:
        await run.close()
    return run.result()


@final
class _LaunchedRun:
    """A run's coordinator, rank processes and output, from the launcher's side."""

    def __init__(self, config: LaunchConfig) -> None:
        display, network = config.display, config.network
        key = secrets.token_bytes(KEY_BYTES)
        self._config = config
        self._server = server = KeptCoordinator(
            config.world_size,
            key,
            listen(LOOPBACK, 0) if network is None else network.listener(),
            survives=network is None,
        )
        if display is not None:
            server.on_message = display.see
        # A store is reached from loopback alone; on a network given nobody needs it.
        self._store = TorchStore() if network is None else None
        self.processes = RankProcesses(server)
        self.processes.on_outlived = self._replace
        self._parts = tempfile.mkdtemp(prefix="elche-") if config.trace_path else None
        self._pipe = os.pipe()  # this process alone has the end that it holds
        self._output = RankOutput(config.on_line, display)
        pipe, may_grow = self._pipe[0], bool(config.rejoin)
        self._facts = LaunchFacts(pipe=pipe, may_grow=may_grow, resumes=True)
        own = {
            **(self._store.environment() if self._store else {}),
            **self._facts.environment(),
            **({TRACE: self._parts} if self._parts else {}),
        }
        self._places: dict[int, int] = {}  # of each rank: whose device it has
        self._environments = [
            each | own
            for each in rank_environments(config.world_size, server.address, key)
        ]

    async def _start(self, rank: int, place: int, **more: str) -> None:
        """Starts a rank at a place, with more variables."""
        config, network, output = self._config, self._config.network, self._output
        self._places[rank] = place
        own = {**self._environments[place], **more}
        environment = rank_environment(config, place, own)
        if config.start is not None:
            self.processes.add(rank, config.start(rank, environment))
            return
        process = await asyncio.create_subprocess_exec(
            *(() if network is None else network.command(place)),
            *config.command,
            env=environment,
            pass_fds=(self._pipe[0],),
            stdout=output.stdout,
            stderr=output.stderr,
            limit=LINE_BYTES,
        )
        output.add(rank, process)
        self.processes.add(rank, process)

    async def _replace(self, rank: int) -> None:
        """Starts another in place of a rank that has died, if the run takes more."""
        config, server = self._config, self._server
        has_ended = server.status.is_finished or server.aborted is not None
        new = len(self._places)
        if new < config.world_size + config.rejoin and not has_ended:
            own = replace(self._facts, joins=True).environment()
            await self._start(new, self._places[rank], RANK=str(new), **own)

    async def run(self) -> None:
        """Starts all ranks, and waits for their end."""
        for rank in range(self._config.world_size):
            await self._start(rank, rank)
        self._server.start()  # while the ranks import
        await self.processes.wait()
        await self._output.finish()

    async def close(self) -> None:
        """Ends what is still there, and writes what the run leaves."""
        config, server = self._config, self._server
        await self.processes.close()
        server.on_message = None
        self._output.close()
        for end in self._pipe:
            os.close(end)
        story = await server.stop(wants_story=config.story_path is not None)
        if config.story_path is not None:
            write_story(config.story_path, story)
        if config.trace_path is not None and self._parts is not None:
            codes = self.processes.exit_codes()
            _write_trace(config.trace_path, Path(self._parts), server, codes)
        if self._store is not None:
            await self._store.close()

    def result(self) -> LaunchResult:
        """Result of the run, which has ended."""
        processes, status = self.processes, self._server.status
        reason = processes.interruption or self._server.aborted or ""
        if status.silent and not reason:
            reason = f"ranks {sorted(status.silent)} were silent: elche has ended them"
        is_used = self._store is not None and self._store.is_used
        return LaunchResult(
            processes.exit_codes(),
            reason,
            processes.terminated,
            processes.failed_first(),
            processes.signal or 0,
            status.has_admitted or is_used,
            processes.failed_s,
        )


def _write_trace(
    path: Path, parts: Path, server: KeptCoordinator, codes: Sequence[int]
) -> None:
    names = {rank: f"rank {rank}" for rank in range(len(codes))}
    names |= {rank: f"rank {rank}: {name}" for rank, name in server.status.devices}
    facts: dict[str, Any] = {"exit codes": list(codes)}
    if any(codes):
        facts["ended by"] = server.aborted
    join_parts(parts, path, names, facts)
    shutil.rmtree(parts, ignore_errors=True)


def rank_environment(
    config: LaunchConfig, place: int, own: Mapping[str, str]
) -> dict[str, str]:
    """A rank's environment: one thread per core share, its device, its emulation."""
    threads = max(1, (os.cpu_count() or 1) // config.world_size)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    for name in os.environ:  # of a launcher around this one
        if name in OF_A_RANK or name.startswith("TORCHELASTIC_"):
            del environment[name]
    environment |= {**config.environment, **own}
    if config.network is not None:
        environment |= config.network.environment(place)
    if config.devices is not None:
        environment["ELCHE_DEVICE"] = config.devices[place]
    if config.display is not None:  # a pipe that is shown on a terminal
        environment.setdefault("PYTHONUNBUFFERED", "1")
    if config.speeds is not None:
        environment["ELCHE_SPEED"] = repr(config.speeds[place])
        environment["ELCHE_MS_PER_SAMPLE"] = repr(config.ms_per_sample)
        environment["ELCHE_FIXED_MS"] = repr(config.fixed_ms)
    return environment


def _device_count(without: int = 1) -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else without


def python_command(*arguments: str) -> tuple[str, ...]:
    """A command that runs this interpreter."""
    return (sys.executable, *arguments)
