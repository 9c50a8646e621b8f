"""The supervisor of a run on Ray: an actor on the head node.

It makes, watches and replaces the ranks' actors, and holds the coordinator, by the code
of `elche run`. It is never restarted elsewhere: only ranks that reach it can commit.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from dataclasses import replace
from typing import Final, final

import ray

from elche.errors import CommunicationError, ConfigError
from elche.ray.rank_specs import Job, PerNode
from elche.ray.ray_ranks import RayRanks
from elche.runtime.process.launch import LaunchedRun
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult, RankBackend
from elche.runtime.process.restarts import launch_with_restarts

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Poll interval (s) of the cluster's nodes."""
MOST_FAILURES: Final = 30
"""Consecutive failures to list the nodes after which the run ends."""


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
        self._signal: signal.Signals | None = None
        self._changing = threading.Lock()  # of both above: calls have own threads
        self._watching: asyncio.Task[None] | None = None
        self._nodes: dict[str, int] = {}  # under `PerNode`: the place of each

    def run(self) -> tuple[LaunchResult, dict[int, bytes]]:
        """Runs the job; returns its result, and the ranks' pickled return values.

        Raises:
            ConfigError: under `PerNode` no node meets a rank's requirements.
            CommunicationError: under `PerNode` Ray no longer lists its nodes.
        """
        job, ranks = self._job, self._job.ranks
        if isinstance(ranks, PerNode):
            self._nodes = {node: at for at, node in enumerate(_fitting(ranks))}
            specs = [ranks.on(node) for node in self._nodes]
        else:
            specs = list(ranks)
        if not specs:
            raise ConfigError(f"expected a node that has what a rank needs, {ranks}")

        def open_ranks(config: LaunchConfig) -> RankBackend:
            self._ranks = RayRanks(config, specs, job)
            return self._ranks

        count = None if job.launch.speeds else len(specs)
        config = replace(job.launch, num_ranks=count, backend=open_ranks)
        result = launch_with_restarts(config, job.restarts, _say, self._begin)
        if self._watching is not None and not self._watching.cancelled():
            self._watching.result()
        assert self._ranks is not None
        return result, self._ranks.results

    def interrupt(self, number: int) -> None:
        """Ends the run as `elche run` does on a signal."""
        with self._changing:
            self._signal = signal.Signals(number)  # for the next launch, if none runs
            if self._run is not None:
                self._run.interrupt(self._signal)

    def _begin(self, run: LaunchedRun) -> None:
        with self._changing:
            self._run = run
            if self._signal is not None:  # when the ranks have been asked for
                run.interrupt(self._signal)
        ranks, there = self._job.ranks, self._ranks
        if isinstance(ranks, PerNode) and there is not None:
            watching = _add_nodes(run, there, ranks, self._nodes)
            self._watching = asyncio.ensure_future(watching)


# No method: Ray would run all methods in one event loop.
async def _add_nodes(
    run: LaunchedRun, there: RayRanks, ranks: PerNode, places: dict[str, int]
) -> None:
    """Starts a rank on each new node: a missing rank, or an additional one.

    Raises:
        CommunicationError: Ray does not list its nodes any more; the run ends.
    """
    failures = 0
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            found = await asyncio.to_thread(_fitting, ranks)
            for node in set(found).difference(places):
                gone = next((each for each in places if each not in found), None)
                if gone is None:
                    place = there.add(ranks.on(node))
                    await run.join(place)
                else:
                    there.move(place := places[gone], ranks.on(node))
                    del places[gone]
                places[node] = place
            failures = 0
        except Exception as error:  # its control store may come back
            failures += 1
            logger.warning("Ray did not list its nodes, or not serve one: %r", error)
            if failures == MOST_FAILURES:
                run.interrupt(signal.SIGTERM)
                raise CommunicationError(
                    f"Ray failed {failures} times in a row to list its nodes: {error!r}"
                    "; the run has ended, start it again with resume=True"
                ) from error


def _fitting(ranks: PerNode) -> list[str]:
    """Ids of the nodes that meet a rank's requirements."""
    return [str(each["NodeID"]) for each in ray.nodes() if ranks.fits(each)]


def _say(line: str) -> None:
    print(f"elche: {line}", file=sys.stderr, flush=True)
