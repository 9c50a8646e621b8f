"""Launcher of a run's ranks, and of its coordinator, wherever the ranks are.

When a rank fails, or the launcher is sent a signal, all ranks are notified through the
coordinator and end by themselves; those that remain after a grace period are
terminated.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from elche.comm.control.frames import KEY_BYTES
from elche.comm.transport.torch_store import TorchStore
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult
from elche.runtime.process.launchers import LaunchFacts, rank_environment
from elche.runtime.process.local_ranks import LocalRanks
from elche.runtime.process.rank_processes import RankProcesses
from elche.runtime.report.files import write_story
from elche.runtime.report.run_watch import RunWatch
from elche.runtime.report.timeline import TRACE, join_parts


@final
class LaunchedRun:
    """A run's coordinator and rank processes, from the launcher's side.

    Attributes:
        processes: processes of the ranks.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._watch = RunWatch(config)
        self._loop = asyncio.get_running_loop()
        self._backend = backend = (config.backend or LocalRanks)(config)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._server = server = KeptCoordinator(
            config.world_size,
            self._key,
            listener := backend.listen(),
            survives=config.network is None,
        )
        # An emulated network needs no rendezvous of torch's.
        self._store = None if config.network else TorchStore(listener.getsockname()[0])
        if self._watch.is_needed:
            server.on_message = self._watch.see
        self.processes = RankProcesses(server, backend.fence, backend.end_waiting)
        self.processes.on_dropped = self._replace
        self._parts = tempfile.mkdtemp(prefix="elche-") if config.trace_path else None
        self._facts = LaunchFacts(
            pipe=backend.pipe,
            may_grow=bool(config.rejoin),
            resumes=True,
            is_watched=config.events is not None,
        )
        self._places: dict[int, int] = {}  # place (device) of each rank
        self._replacements = config.rejoin

    async def run(self) -> None:
        """Starts all ranks, and waits for their end."""
        for rank in range(self._config.world_size):
            await self._start(rank, rank, self._facts)
        self._server.start()  # while the ranks import
        await self.processes.wait()

    def interrupt(self, number: signal.Signals) -> None:
        """Calls `RankProcesses.interrupt`, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.processes.interrupt, number)

    async def join(self, place: int) -> None:
        """Starts another rank, which joins the run, unless that is over."""
        if not (self._server.status.is_finished or self._server.aborted):
            facts = replace(self._facts, joins=True)
            await self._start(len(self._places), place, facts)

    async def _replace(self, rank: int) -> None:
        """Starts a replacement of a dead rank, if ``rejoin`` allows another."""
        if self._replacements:
            self._replacements -= 1
            await self.join(self._places[rank])

    async def _start(self, rank: int, place: int, facts: LaunchFacts) -> None:
        config, address = self._config, self._server.address
        self._places[rank] = place
        environment = {
            **config.environment,
            **({} if self._store is None else self._store.environment()),
            **rank_environment(rank, config.world_size, address, self._key),
            **facts.environment(),
            **config.device_environment(place),
            **({TRACE: self._parts} if self._parts else {}),
        }
        process = await self._backend.start(rank, place, environment)
        self.processes.add(rank, process)

    async def close(self) -> None:
        """Ends remaining processes, and writes the event log and the timeline."""
        config, server = self._config, self._server
        await self.processes.close()
        server.on_message = None
        self._watch.close(self.result())
        await self._backend.close()
        if self._store is not None:
            await self._store.close()
        story = await server.stop(wants_story=config.story_path is not None)
        if config.story_path is not None:
            write_story(config.story_path, story)
        if config.trace_path is not None and self._parts is not None:
            self._write_trace(config.trace_path, Path(self._parts))

    def _write_trace(self, path: Path, parts: Path) -> None:
        server, codes = self._server, self.processes.exit_codes()
        names = {rank: f"rank {rank}" for rank in range(len(codes))}
        names |= {rank: f"rank {rank}: {name}" for rank, name in server.status.devices}
        facts: dict[str, Any] = {"exit codes": list(codes)}
        if any(codes):
            facts["ended by"] = server.aborted
        join_parts(parts, path, names, facts, self._watch.marks())
        shutil.rmtree(parts, ignore_errors=True)

    def result(self) -> LaunchResult:
        """Result of the run, which has ended."""
        processes, status = self.processes, self._server.status
        reason = processes.interruption or self._server.aborted or ""
        if status.silent and not reason:
            reason = f"ranks {sorted(status.silent)} were silent: elche has ended them"
        return LaunchResult(
            processes.exit_codes(),
            reason,
            processes.terminated,
            processes.failed_first(),
            processes.signal or 0,
            status.has_admitted or bool(self._store and self._store.is_used),
            processes.failed_s,
        )


def handle_signals(run: LaunchedRun) -> None:
    """Routes this process's signals to a run's ranks."""
    run.processes.handle_signals()


def launch(
    config: LaunchConfig, on_ready: Callable[[LaunchedRun], None] = handle_signals
) -> LaunchResult:
    """Starts the ranks, serves them, and waits for their end.

    Args:
        config: command, ranks and options.
        on_ready: called in the event loop before the first rank is started.

    Raises:
        ConfigError: a device does not exist.
    """
    if config.devices is not None:
        from elche.devices.choice import check_device, is_known

        for name in config.devices:
            if is_known(name) or ":" not in name:  # else ranks know, by an extension
                check_device(name)
    return asyncio.run(_launch(config, on_ready))


async def _launch(
    config: LaunchConfig, on_ready: Callable[[LaunchedRun], None]
) -> LaunchResult:
    run = LaunchedRun(config)
    try:
        on_ready(run)
        await run.run()
    finally:
        await run.close()
    return run.result()
