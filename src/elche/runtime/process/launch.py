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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

from elche.comm.control.addresses import format_address, listen
from elche.comm.control.key_file import KEY_BYTES
from elche.errors import CommunicationError, ConfigError
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.hosts.late_hosts import LateHosts
from elche.runtime.hosts.leader import Leader
from elche.runtime.process.launcher_watch import PIPE
from elche.runtime.process.launchers import rank_environments
from elche.runtime.process.rank_output import LINE_BYTES, Display, RankOutput
from elche.runtime.process.rank_processes import RankProcess, RankProcesses
from elche.runtime.process.torch_store import TorchStore
from elche.runtime.report.files import write_story
from elche.runtime.report.trace_parts import TRACE, join_parts

LOOPBACK = "127.0.0.1"
RESUMES = "ELCHE_COORDINATOR_KEPT"
"""Tells ranks that the coordinator is started anew when it dies."""
MOVES = "ELCHE_COORDINATOR_MOVES"
"""Tells ranks that another host's may go on in its place."""
JOINS = "ELCHE_JOINS"
"""Tells a rank that it is to join a run under way."""
REJOIN = "ELCHE_REJOIN"
"""Tells ranks that others may join them."""
OF_A_RANK = "ELCHE_SPEED", "ELCHE_DEVICE", JOINS, REJOIN, RESUMES, MOVES


class Network(Protocol):
    """Where ranks and coordinator meet."""

    def command(self, rank: int) -> tuple[str, ...]:
        """What to put before a rank's command, so that it runs in its place."""

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that a rank needs there."""

    def listener(self) -> socket.socket:
        """A socket that listens where all ranks can reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """What to start.

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
        on_first_batch: called when the coordinator first hears that batches are done.
        story_path: file for what the ranks and the coordinator said and decided,
            written when the run ends, however it ends.
        start: starts a rank's process with this environment, in place of the command.
        trace_path: file for the timeline of all ranks, written then as well.
        display: shows the run, and what the ranks print, on this terminal.
        hosts: this launcher is one of several, or others may join; None: the only one.
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
    on_first_batch: Callable[[], None] | None = None
    story_path: Path | None = None
    start: Callable[[int, Mapping[str, str]], RankProcess] | None = None
    trace_path: Path | None = None
    display: Display | None = None
    hosts: HostsConfig | None = None
    rejoin: int = 0

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("num_ranks", "devices", "speeds")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ConfigError(
                f"expected one of --nproc, --devices and --speeds, got {len(given)}"
            )
        if self.rejoin < 0:
            raise ConfigError(f"expected --rejoin from 0 on, got {self.rejoin}")
        if self.rejoin and not (self.hosts is None or self.hosts.is_open):
            raise ConfigError(
                "--rejoin serves one host; leave out --nnodes and --hosts"
            )
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigError(f"expected --nproc of at least 1, got {self.num_ranks}")
        for speed in self.speeds or ():
            if not math.isfinite(speed) or speed <= 0:
                raise ConfigError(f"expected positive --speeds, got {speed!r}")
        if not math.isfinite(self.ms_per_sample) or self.ms_per_sample <= 0:
            raise ConfigError(
                f"expected a positive --ms-per-sample, got {self.ms_per_sample!r}"
            )
        if not math.isfinite(self.fixed_ms) or self.fixed_ms < 0:
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
    """How a run ended.

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
        """Of the run: by the signal, or that of the rank that failed first."""
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
        CommunicationError: the other hosts are lost, and may go on without this one.
    """
    if config.devices is not None:
        _check_devices(config.devices)
    return asyncio.run(_launch(config, on_ready))


async def _launch(
    config: LaunchConfig, on_ready: Callable[[RankProcesses], None]
) -> LaunchResult:
    hosts, leader = config.hosts, None
    if hosts is not None and not hosts.is_open:
        leader = Leader(hosts, config.world_size)
        await leader.gather()
    run = _LaunchedRun(config, leader)
    try:
        on_ready(run.processes)
        if leader is not None:
            leader.attach(run.server, run.processes)
        await run.go()
    finally:
        await run.close()
    return await run.end()


@final
class _LaunchedRun:
    """A run as its launcher holds it: the coordinator, and this host's ranks.

    Args:
        config: what to start.
        leader: of the launchers of several hosts, which have gathered; None: of one.

    Attributes:
        server: the coordinator.
        processes: of the ranks.
    """

    def __init__(self, config: LaunchConfig, leader: Leader | None) -> None:
        hosts, display, count = config.hosts, config.display, config.world_size
        key = secrets.token_bytes(KEY_BYTES) if hosts is None else hosts.key
        own_address = LOOPBACK if hosts is None else hosts.own_address()
        world_size = count if leader is None else leader.world_size
        self._config, self._leader = config, leader
        self.server = server = KeptCoordinator(
            world_size,
            key,
            survives=config.network is None,
            several_hosts=leader is not None,
            listener=_listener(config, leader, own_address),
        )
        if display is not None:
            server.on_message = display.see
        # A store is reached from loopback alone; on a network given nobody needs it.
        is_one_host = config.network is None and leader is None
        self._store = TorchStore() if is_one_host else None
        self.processes = processes = RankProcesses(server)
        processes.on_outlived = self._outlived
        self._late: LateHosts | None = None
        if hosts is not None and hosts.is_open:
            say = _say if display is None else display.print_line
            self._late = LateHosts(hosts, count, server, processes, say)
        begun = config.on_first_batch, None if self._late is None else self._late.begin
        server.on_first_batch = partial(_call_all, begun)
        self._parts = tempfile.mkdtemp(prefix="elche-") if config.trace_path else None
        self._pipe = os.pipe()  # this process alone has the end that it holds
        self._output = RankOutput(config.on_line, display, self._have_met)
        own = self._variables(own_address)
        self._places: dict[int, int] = {}  # of each rank: whose device it has
        self._environments = [
            each | own
            for each in rank_environments(world_size, server.address, key, range(count))
        ]

    def _variables(self, own_address: str) -> dict[str, str]:
        """What each rank of this host finds in its environment."""
        config, is_open = self._config, self._late is not None
        return {
            **(self._store.environment() if self._store else {}),
            **({} if config.hosts is None else {"ELCHE_LISTEN": own_address}),
            PIPE: str(self._pipe[0]),
            RESUMES: "1",
            **({TRACE: self._parts} if self._parts else {}),
            **({REJOIN: "1"} if config.rejoin or is_open else {}),
        }

    def _have_met(self) -> bool:
        is_used = self._store is not None and self._store.is_used
        return self.server.status.has_admitted or is_used

    async def _start(self, rank: int, place: int, **more: str) -> None:
        """Starts a rank at a place of this host, with more variables."""
        config, output = self._config, self._output
        self._places[rank] = place
        own = {**self._environments[place], **more}
        environment, pipe = rank_environment(config, place, own), self._pipe[0]
        process = await start_rank(config, place, environment, pipe, output, rank)
        self.processes.add(rank, process)

    async def _outlived(self, rank: int) -> None:
        """Starts another in place of a rank that has died, if the run takes more.

        Not of one that is on another host.
        """
        config, server = self._config, self.server
        has_ended = server.status.is_finished or server.aborted is not None
        has_more = len(self._places) < config.world_size + config.rejoin
        if rank in self._places and has_more and not has_ended:
            new = server.add_rank()
            await self._start(new, self._places[rank], RANK=str(new), **{JOINS: "1"})
        if self._late is not None:
            self._late.outlived(rank)

    async def go(self) -> None:
        """Starts all ranks, and waits for their end."""
        count, of_all = self._config.world_size, {**self._config.environment}
        of_all[RESUMES] = "1"
        if self._late is not None:
            told = {JOINS: "1", REJOIN: "1"}
            told["ELCHE_COORDINATOR"] = format_address(*self.server.address)
            await self._late.listen({**of_all, **told})
        for place in range(count):
            await self._start(place, place)
        self.server.start()  # while the ranks import
        others = () if self._leader is None else self._leader.start(of_all)
        for rank, process in enumerate(others, count):
            self.processes.add(rank, process)
        await self.processes.wait()
        await self._output.finish()

    async def close(self) -> None:
        """Ends what is still there, and writes what the run leaves."""
        config, server = self._config, self.server
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

    async def end(self) -> LaunchResult:
        """How the run has ended, which the other hosts are told.

        Raises:
            CommunicationError: they are lost, and may go on without this one.
        """
        processes = self.processes
        given_up, aborted = processes.given_up, self.server.aborted
        if (silent := self.server.status.silent) and not aborted:
            aborted = f"ranks {sorted(silent)} were silent: elche has ended them"
        result = LaunchResult(
            processes.exit_codes(),
            given_up or processes.interruption or aborted or "",
            processes.terminated,
            processes.failed_first(),
            processes.signal or 0,
            self._have_met(),
            processes.failed_s,
        )
        for each in (self._leader, self._late):
            if each is not None:
                await each.end(1 if given_up else result.exit_code, result.reason)
        if processes.given_up:
            raise CommunicationError(processes.given_up)
        return result


def _listener(
    config: LaunchConfig, leader: Leader | None, own_address: str
) -> socket.socket:
    """Where ranks connect to."""
    if config.network is not None:
        return config.network.listener()
    listening = None if leader is None else leader.listener
    return listening or listen(own_address, 0)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _call_all(calls: Sequence[Callable[[], None] | None]) -> None:
    for call in filter(None, calls):
        call()


async def start_rank(
    config: LaunchConfig,
    place: int,
    environment: Mapping[str, str],
    pipe: int,
    output: RankOutput,
    rank: int,
) -> RankProcess:
    """Starts the process of a rank of this host.

    Args:
        config: what to start.
        place: of the rank, among this host's.
        environment: of the process, whole.
        pipe: that it watches; see `launcher_watch`.
        output: takes what it prints.
        rank: by which it is known there.
    """
    if config.start is not None:
        return config.start(rank, environment)
    network = config.network
    process = await asyncio.create_subprocess_exec(
        *(() if network is None else network.command(place)),
        *config.command,
        env=environment,
        pass_fds=(pipe,),
        stdout=output.stdout,
        stderr=output.stderr,
        limit=LINE_BYTES,
        # A Ctrl-C there has the host leave: its ranks are told when.
        start_new_session=config.hosts is not None and config.hosts.node_rank > 0,
    )
    output.add(rank, process)
    return process


def _write_trace(
    path: Path, parts: Path, server: KeptCoordinator, codes: Sequence[int]
) -> None:
    devices = dict(server.status.devices)
    names = {
        rank: f"rank {rank}: {devices[rank]}" if rank in devices else f"rank {rank}"
        for rank in range(len(codes))
    }
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


def _check_devices(names: Sequence[str]) -> None:
    from elche.runtime.process.environment import check_device

    for name in names:
        check_device(name)


def python_command(*arguments: str) -> tuple[str, ...]:
    """A command that runs this interpreter."""
    return (sys.executable, *arguments)
