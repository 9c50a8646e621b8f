"""Ranks as processes on the nodes of a Ray cluster; see `RankBackend`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.placement_group import remove_placement_group as remove_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elche.comm.control.addresses import listen
from elche.ray.rank_host import RankHost
from elche.ray.rank_specs import Job, RankSpec
from elche.runtime.process.launch_config import LaunchConfig
from elche.runtime.process.rank_processes import RankProcess

logger = logging.getLogger(__name__)

FENCE_S: Final = 1.0
"""Deadline (s) of a node to confirm that a rank's process was killed.

A rank that cannot reach the coordinator ends itself soon after; see `UNREACHABLE_S`.
"""
AGAIN_S: Final = 1.0
"""Pause (s) before another actor is requested."""
KILLED: Final = -int(signal.SIGKILL)


@final
class RayRanks:
    """Starts ranks in actors, each in a bundle of its own.

    Args:
        config: configuration of the launch.
        specs: requirements of the initial places.
        job: run to be launched.

    Attributes:
        results: pickled results of ranks whose processes have ended.
    """

    def __init__(
        self, config: LaunchConfig, specs: Sequence[RankSpec], job: Job
    ) -> None:
        self.pipe = -1
        self._world_size, self._job = config.world_size, job
        self._address = get_node_ip_address()
        self._places: list[tuple[RankSpec, PlacementGroup, int]] = []
        self._hosts: dict[int, Any] = {}
        self._processes: list[RayProcess] = []
        self.results: dict[int, bytes] = {}
        self.add(*specs)

    def add(self, *specs: RankSpec) -> int:
        """Adds places in one placement group; returns the first place's number."""
        first = len(self._places)
        bundles = [dict(spec.resources) for spec in specs]
        labels = [dict(spec.label_selector) for spec in specs]
        group = placement_group(bundles, bundle_label_selector=labels)
        self._places += [(spec, group, n) for n, spec in enumerate(specs)]
        return first

    def listen(self) -> socket.socket:
        """See `RankBackend`."""
        return listen(self._address, 0)

    async def start(
        self, rank: int, place: int, environment: dict[str, str]
    ) -> RankProcess:
        """See `RankBackend`."""
        spec = self._places[place][0]
        if not spec.resources.get("GPU"):
            environment.setdefault("ELCHE_DEVICE", "cpu")
        is_first = rank < self._world_size

        def fail(why: str) -> int:
            logger.error("rank %d: %s", rank, why)
            self.results[rank] = pickle.dumps((None, why, ""))
            self._drop(place)
            return 1

        async def run(process: RayProcess) -> int:
            try:
                starting = self._begin(process, place, environment)
                if is_first:
                    await asyncio.wait_for(starting, self._job.start_s)
                else:
                    await starting
                code, self.results[rank] = await process.host.wait.remote()
            except asyncio.TimeoutError:
                why = process.trouble or (
                    f"no node has {dict(spec.resources)} free, with labels "
                    f"{dict(spec.label_selector)}"
                )
                return fail(f"it was not started in {self._job.start_s:g} s: {why}")
            except ValueError as error:
                return fail(f"Ray refuses {dict(spec.resources)}: {error}")
            except RayTaskError as error:
                return fail(f"its process cannot be started: {error.cause}")
            except RayError as error:
                logger.warning("rank %d: its node or actor has died: %s", rank, error)
                self._drop(place)
                return KILLED
            return int(code)

        process = RayProcess(run, lambda: self._drop(place))
        self._processes.append(process)
        return process

    async def _begin(
        self, process: RayProcess, place: int, environment: dict[str, str]
    ) -> None:
        """Starts a process as soon as a node has room for it."""
        job = self._job
        while not process.has_started:
            host = process.host = self._host(place)
            try:
                await host.start.remote(job.command, job.call, environment)
                process.has_started = True
            except RayTaskError:  # it would fail again
                raise
            except RayError as error:  # a node that Ray still thinks alive
                process.trouble = f"its actor has died before it began: {error}"
                logger.info("%s", process.trouble)
                self._drop(place)
                await asyncio.sleep(AGAIN_S)

    async def fence(self, process: RankProcess) -> None:
        """See `RankBackend`."""
        assert isinstance(process, RayProcess)
        await process.fence()

    def end_waiting(self) -> None:
        """Cancels ranks that wait for a node, when the run is over."""
        for each in self._processes:
            if not each.has_started and each.returncode is None:
                each.send_signal(signal.SIGTERM)

    def _host(self, place: int) -> Any:
        """Returns the actor of a place; Ray starts it when a node has room."""
        if place not in self._hosts:
            spec, group, bundle = self._places[place]
            named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
            options: dict[str, Any] = {"num_cpus": 0}
            options |= {named[k]: v for k, v in spec.resources.items() if k in named}
            rest = {k: v for k, v in spec.resources.items() if k not in named}
            where = PlacementGroupSchedulingStrategy(group, bundle)
            self._hosts[place] = (
                ray.remote(RankHost)
                .options(**options, resources=rest, scheduling_strategy=where)
                .remote()
            )
        return self._hosts[place]

    def _drop(self, place: int) -> None:
        """Kills the actor of a place; the next rank there gets a new one."""
        host = self._hosts.pop(place, None)
        if host is not None:
            with contextlib.suppress(RayError):
                ray.kill(host)

    async def close(self) -> None:
        """See `RankBackend`."""
        for place in list(self._hosts):
            self._drop(place)
        for group in {group.id: group for _, group, _ in self._places}.values():
            remove_group(group)


@final
class RayProcess:
    """A rank's process on a node, or waiting for a node.

    Args:
        run: starts the process, waits for its end, and returns its exit code.
        drop: kills its actor.

    Attributes:
        host: its actor.
        has_started: False while it waits for a node.
        trouble: why its last actor died before the start; "" if none did.
        returncode: see `RankProcess`.
    """

    pid = None

    def __init__(
        self, run: Callable[[RayProcess], Any], drop: Callable[[], None]
    ) -> None:
        self.host: Any = None
        self.has_started = False
        self.returncode: int | None = None
        self.trouble = ""
        self._drop = drop
        self._running: asyncio.Task[int] = asyncio.ensure_future(run(self))
        self._running.add_done_callback(self._note_end)

    def send_signal(self, number: int, /) -> None:
        """See `RankProcess`."""
        if self.has_started:
            self.host.send_signal.remote(number)
        else:
            self._give_up(-number)

    async def wait(self) -> int:
        """See `RankProcess`."""
        await asyncio.wait([self._running])  # after `_note_end`
        return self.returncode or 0

    async def fence(self) -> None:
        """Kills the process; a node that does not confirm this counts as dead."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            await asyncio.wait([self._running], timeout=FENCE_S)
        if self.returncode is None:
            self._give_up(KILLED)

    def _give_up(self, code: int) -> None:
        self._drop()
        self.returncode = code
        self._running.cancel()

    def _note_end(self, running: asyncio.Task[int]) -> None:
        if not running.cancelled():
            error = running.exception()
            if error is not None:
                logger.error("a rank cannot be started or watched", exc_info=error)
            self.returncode = running.result() if error is None else 1
