"""The supervisor of a run on Ray: an actor on the head node.

It makes, watches and replaces the ranks' actors, and holds the coordinator, by the code
of `elche run`. It is never restarted elsewhere: only ranks that reach it can commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final, final

import ray

from elche.errors import ConfigError
from elche.ray.rank_specs import Job, PerNode, RankSpec
from elche.ray.ray_ranks import RayRanks
from elche.runtime.process.launch import LaunchedRun
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult, RankBackend
from elche.runtime.process.restarts import launch_with_restarts

LOOK_S: Final = 1.0
"""Poll interval (s) of the cluster's nodes."""


@final
class Supervisor:
    """Runs one job; each call runs in its own thread.

    Args:
        job: run to be started.
    """

    def __init__(self, job: Job) -> None:
        logging.basicConfig(format="elche: %(message)s")
        self._job = job
        self._ranks: RayRanks | None = None
        self._run: LaunchedRun | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signal: signal.Signals | None = None
        self._changing = threading.Lock()  # of the three above: calls have own threads
        self._watching: asyncio.Task[None] | None = None
        self._nodes: dict[str, int] = {}  # under `PerNode`: the place of each

    def run(self) -> tuple[LaunchResult, dict[int, bytes]]:
        """Runs the job; returns its result, and the ranks' pickled return values.

        Raises:
            ConfigError: under `PerNode` no node meets a rank's requirements.
        """
        job, ranks = self._job, self._job.ranks
        if isinstance(ranks, PerNode):
            found = _fitting(ranks)
            self._nodes = {node: place for place, node in enumerate(found)}
            specs = [ranks.on(node) for node in found]
        else:
            specs = list(ranks)
        if not specs:
            raise ConfigError(f"expected a node that has what a rank needs, {ranks}")

        def open_ranks(config: LaunchConfig) -> RankBackend:
            self._ranks = RayRanks(config, specs, job)
            return self._ranks

        config = LaunchConfig(
            command=job.command,
            num_ranks=None if "speeds" in job.launch else len(specs),
            backend=open_ranks,
            **job.launch,
        )
        result = launch_with_restarts(config, job.restarts, _say, self._begin)
        assert self._ranks is not None
        return result, self._ranks.results

    def interrupt(self, number: int) -> None:
        """Ends the run as `elche run` does on a signal."""
        with self._changing:
            self._signal = signal.Signals(number)  # for the next launch, if none runs
            if self._loop is not None and self._run is not None:
                with contextlib.suppress(RuntimeError):  # the old loop is closed
                    self._loop.call_soon_threadsafe(
                        self._run.processes.interrupt, self._signal
                    )

    def _begin(self, run: LaunchedRun) -> None:
        with self._changing:
            self._run, self._loop = run, asyncio.get_running_loop()
            if self._signal is not None:  # when the ranks have been asked for
                self._loop.call_soon(run.processes.interrupt, self._signal)
        assert self._ranks is not None
        watching = _watch_nodes(run, self._ranks, self._job.ranks, self._nodes)
        self._watching = self._loop.create_task(watching)


# No method: Ray would run all methods in one event loop.
async def _watch_nodes(
    run: LaunchedRun,
    there: RayRanks,
    ranks: Sequence[RankSpec] | PerNode,
    places: dict[str, int],
) -> None:
    """Ends waiting ranks after the run; under `PerNode` adds ranks on new nodes."""
    while True:
        await asyncio.sleep(LOOK_S)
        if run.is_over:
            there.end_waiting()
        if isinstance(ranks, PerNode):
            for node in await asyncio.to_thread(_fitting, ranks):
                if node not in places:
                    places[node] = there.add(ranks.on(node))
                    await run.join(places[node])


def _fitting(ranks: PerNode) -> list[str]:
    """Ids of the nodes that meet a rank's requirements."""
    return [str(each["NodeID"]) for each in ray.nodes() if ranks.fits(each)]


def _say(line: str) -> None:
    print(f"elche: {line}", file=sys.stderr, flush=True)
