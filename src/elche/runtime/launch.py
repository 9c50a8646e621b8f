"""Starting the ranks of a run on this machine, with the coordinator in this process.

When a rank fails the others are told why through the coordinator and end by themselves;
what is still there after a grace period is terminated. Only processes that were started
here are ever signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from elche.errors import ConfigError
from elche.runtime.coordinator import KEY_BYTES, CoordinatorServer, rank_environments

GRACE_S = 10.0
INTERRUPTED = 130
KILL_AFTER_S = 5.0
LINE_BYTES = 1 << 22


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
        environment: further variables for every rank.
        on_line: called with rank and text of each line that a rank prints, instead
            of passing the ranks' standard output on.
        network: where ranks and coordinator meet, if not on this host's loopback.
        story_path: file for what the ranks and the coordinator said and decided,
            written when the run ends, however it ends.
    """

    command: tuple[str, ...]
    num_ranks: int | None = None
    devices: tuple[str, ...] | None = None
    speeds: tuple[float, ...] | None = None
    ms_per_sample: float = 1.25
    environment: Mapping[str, str] = field(default_factory=dict)
    on_line: Callable[[int, str], None] | None = None
    network: Network | None = None
    story_path: Path | None = None

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
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigError(f"expected --nproc of at least 1, got {self.num_ranks}")
        for speed in self.speeds or ():
            if not math.isfinite(speed) or speed <= 0:
                raise ConfigError(f"expected positive --speeds, got {speed!r}")
        if not math.isfinite(self.ms_per_sample) or self.ms_per_sample <= 0:
            raise ConfigError(
                f"expected a positive --ms-per-sample, got {self.ms_per_sample!r}"
            )

    @property
    def world_size(self) -> int:
        """Ranks to start; every CUDA device of the machine when nothing is said."""
        if self.devices is not None:
            return len(self.devices)
        if self.speeds is not None:
            return len(self.speeds)
        return self.num_ranks if self.num_ranks is not None else _device_count()


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a run ended.

    Attributes:
        exit_codes: each rank's exit code; a signal counts as 128 + its number.
        reason: why the run was ended, "" if it was not.
        terminated: ranks that had to be ended here.
    """

    exit_codes: tuple[int, ...]
    reason: str
    terminated: tuple[int, ...]

    @property
    def exit_code(self) -> int:
        """The exit code of the run: that of the first rank that failed by itself."""
        if self.reason == "interrupted":
            return INTERRUPTED
        own = [
            code
            for rank, code in enumerate(self.exit_codes)
            if code and rank not in self.terminated
        ]
        return (own or [code for code in self.exit_codes if code] or [0])[0]


def launch(config: LaunchConfig) -> LaunchResult:
    """Starts the ranks, serves them, and waits for their end.

    Raises:
        ConfigError: a device does not exist.
    """
    if config.devices is not None:
        _check_devices(config.devices)
    return asyncio.run(_launch(config))


async def _launch(config: LaunchConfig) -> LaunchResult:
    key = secrets.token_bytes(KEY_BYTES)
    server = CoordinatorServer(config.world_size, key)
    network = config.network
    listener = None if network is None else network.listener()
    address = await server.start(listener=listener)
    environments = rank_environments(config.world_size, address, key)
    processes: list[asyncio.subprocess.Process] = []
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    try:
        for rank, own in enumerate(environments):
            processes.append(
                await asyncio.create_subprocess_exec(
                    *(() if network is None else network.command(rank)),
                    *config.command,
                    env=_environment(config, rank, own),
                    stdout=asyncio.subprocess.PIPE if config.on_line else None,
                    limit=LINE_BYTES,
                )
            )
        readers = [
            asyncio.ensure_future(_read_lines(process, rank, config.on_line))
            for rank, process in enumerate(processes)
            if config.on_line is not None
        ]
        terminated = await _supervise(processes, stop, server.rank_ended)
        await asyncio.gather(*readers)
    finally:
        await _end(processes, 0.0)
        await server.stop()
        if config.story_path is not None:
            server.write_story(config.story_path)
    codes = tuple(_code(process.returncode) for process in processes)
    if stop.is_set():
        return LaunchResult(codes, "interrupted", tuple(terminated))
    return LaunchResult(codes, server.core.aborted or "", tuple(terminated))


async def _supervise(
    processes: Sequence[asyncio.subprocess.Process],
    stop: asyncio.Event,
    on_end: Callable[[int, int], None],
) -> list[int]:
    """Waits for all ranks; after a first failure, only for a grace period."""
    waits = {
        asyncio.ensure_future(process.wait()): rank
        for rank, process in enumerate(processes)
    }
    stopped = asyncio.ensure_future(stop.wait())
    deadline_s = math.inf
    while waits:
        left_s = None if math.isinf(deadline_s) else deadline_s - time.monotonic()
        done, _ = await asyncio.wait(
            {*waits, stopped}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
        )
        if stopped in done:
            await asyncio.wait(waits, timeout=GRACE_S)
            break
        if not done:
            break
        for task in done:
            rank = waits.pop(task)
            on_end(rank, processes[rank].returncode or 0)
            if processes[rank].returncode and math.isinf(deadline_s):
                deadline_s = time.monotonic() + GRACE_S
    stopped.cancel()
    late = sorted(waits.values())
    await _end(processes, KILL_AFTER_S)
    for task in waits:
        task.cancel()
    return late


async def _read_lines(
    process: asyncio.subprocess.Process, rank: int, take: Callable[[int, str], None]
) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        take(rank, line.decode(errors="replace").rstrip("\n"))


async def _end(processes: Sequence[asyncio.subprocess.Process], grace_s: float) -> None:
    """Terminates what still runs, and kills what does not end in time."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.terminate() if grace_s > 0 else process.kill()
    for process in running:
        try:
            await asyncio.wait_for(process.wait(), max(grace_s, 1.0))
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _environment(
    config: LaunchConfig, rank: int, own: Mapping[str, str]
) -> dict[str, str]:
    """A rank's environment: one thread per core share, its device, its emulation."""
    threads = max(1, (os.cpu_count() or 1) // config.world_size)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    for name in ("ELCHE_SPEED", "ELCHE_DEVICE"):
        environment.pop(name, None)
    environment |= {**config.environment, **own}
    if config.network is not None:
        environment |= config.network.environment(rank)
    if config.devices is not None:
        environment["ELCHE_DEVICE"] = config.devices[rank]
    if config.speeds is not None:
        environment["ELCHE_SPEED"] = repr(config.speeds[rank])
        environment["ELCHE_MS_PER_SAMPLE"] = repr(config.ms_per_sample)
    return environment


def _device_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 1


def _check_devices(names: Sequence[str]) -> None:
    from elche.runtime.environment import check_device

    for name in names:
        check_device(name)


def _code(returncode: int | None) -> int:
    if returncode is None:
        return 1
    return 128 - returncode if returncode < 0 else returncode


def python_command(*arguments: str) -> tuple[str, ...]:
    """A command that runs this interpreter."""
    return (sys.executable, *arguments)
