"""`elche.ray.run`: a function or a script on the nodes of a Ray cluster.

It starts the supervisor of the run, an actor on the head node. The supervisor makes,
watches and replaces the ranks' actors, and holds the coordinator, with the code of
`elche run`. It is never restarted elsewhere: only ranks that reach it can commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elche.config import PolicyName
from elche.errors import CommunicationError, ConfigError
from elche.ray.rank_specs import Job, PerNode, RankSpec
from elche.ray.ray_ranks import RayRanks
from elche.runtime.process.launch import LaunchedRun
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult, RankBackend
from elche.runtime.process.restarts import RestartConfig, launch_with_restarts

logger = logging.getLogger(__name__)

HEAD = "node:__internal_head__"
"""Resource that Ray gives to the head node alone."""
LOOK_S: Final = 1.0
"""Poll interval (s) of the cluster's nodes."""
MOST_FAILURES: Final = 30
"""Consecutive failures to list the nodes after which the run ends."""


def run(
    train: Callable[..., Any] | str | Path,
    ranks: Sequence[RankSpec] | PerNode,
    *,
    args: Sequence[Any] = (),
    policy: PolicyName | None = None,
    rejoin: int = 100,
    min_ranks: int | None = None,
    max_restarts: int = 0,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: float | None = None,
    keep: int = 2,
    resume: bool = False,
    story: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    speeds: Sequence[float] | None = None,
    ms_per_sample: float = 1.25,
    start_timeout_s: float = 300.0,
) -> Any:
    """Runs a function, or a script, on every rank, on the nodes of a Ray cluster.

    It connects to a cluster as `ray.init` does, unless this process is connected. All
    of elche works inside as on one machine. A rank that dies is replaced where Ray
    finds room, and training continues meanwhile.

    Args:
        train: the function, or a script's path on every node (relative to the job's
            working directory).
        ranks: node requirements of each rank; or `per_node`.
        args: arguments of the function or of the script.
        policy: policy of a script that names none.
        rejoin: most replacements of dead ranks.
        min_ranks: training pauses while fewer ranks are alive.
        max_restarts: most restarts of all ranks when a death ends the run.
        checkpoint_dir: folder for checkpoints, which all nodes see.
        checkpoint_every: seconds between two checkpoints.
        keep: complete checkpoints to keep.
        resume: continue from the newest checkpoint of the folder.
        story: file on the head node for the event log.
        environment: further variables of every rank.
        speeds: relative speeds of emulated CPU devices, one per rank.
        ms_per_sample: time per sample (ms) of an emulated device of speed 1.
        start_timeout_s: deadline of the first ranks' start.

    Returns:
        Return value of the function on the first rank without error; None for a script.

    Raises:
        ConfigError: an argument is wrong.
        RemoteRankError: the rank that failed first, its error and its traceback.
        KeyboardInterrupt: on Ctrl-C, when all ranks have ended.
        SystemExit: on SIGTERM, likewise.
    """
    from elche.launching.launching import value_of

    hints = _hints_of(ranks, speeds)
    if isinstance(ranks, PerNode) and (max_restarts or not rejoin):
        raise ConfigError(
            "expected max_restarts=0 and rejoin from 1 on with per_node, whose ranks "
            f"come and go, got {max_restarts} and {rejoin}; give a list of RankSpec"
        )
    is_script = isinstance(train, (str, Path))
    if not is_script and not callable(train):
        raise ConfigError(f"expected a function or a script's path, got {train!r}")
    own = {
        "ELCHE_POLICY": policy,
        "ELCHE_MIN_RANKS": min_ranks,
        "ELCHE_SPEED_HINTS": ",".join(map(str, hints)) or None,
    }
    variables = dict(environment or {})
    variables |= {name: str(each) for name, each in own.items() if each is not None}
    for name, text in variables.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(f"expected text in environment, got {name!r}: {text!r}")
    launch = LaunchConfig(
        command=(str(train), *map(str, args)) if is_script else (),
        speeds=None if speeds is None else tuple(speeds),
        ms_per_sample=ms_per_sample,
        environment=variables,
        story_path=None if story is None else Path(story),
        rejoin=rejoin,
    )
    restarts = RestartConfig(
        checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir),
        every_s=checkpoint_every,
        keep=keep,
        resume=resume,
        max_restarts=max_restarts,
    )
    call = b"" if is_script else _pickled(train, tuple(args))
    job = Job(ranks, call, launch, restarts, start_timeout_s)
    result, returned = _supervise(job)
    if result.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if result.signal:
        raise SystemExit(result.exit_code)

    return value_of(result, lambda rank: returned.get(rank, b""))


def _hints_of(
    ranks: Sequence[RankSpec] | PerNode, speeds: Sequence[float] | None
) -> list[float]:
    """The ranks' speed hints; [] if none has one.

    Raises:
        ConfigError: the requirements or the number of speeds are wrong.
    """
    is_per_node = isinstance(ranks, PerNode)
    specs = [] if isinstance(ranks, PerNode) else ranks
    is_list = isinstance(specs, Sequence) and (is_per_node or specs)
    if not is_list or not all(isinstance(spec, RankSpec) for spec in specs):
        raise ConfigError(
            "expected a list of at least one RankSpec, or elche.ray.per_node(), got "
            f"{ranks!r}"
        )
    if speeds is not None and len(speeds) != len(specs):
        raise ConfigError("expected speeds of each of a fixed number of ranks")
    hints = [each.speed_hint for each in specs if each.speed_hint is not None]
    if hints and len(hints) < len(specs):
        raise ConfigError(
            f"expected a speed_hint of every rank or of none, got {len(hints)} for "
            f"{len(specs)} ranks"
        )
    return hints


def _pickled(train: object, args: tuple[Any, ...]) -> bytes:
    try:
        return bytes(cloudpickle.dumps((train, args)))
    except Exception as error:
        raise ConfigError(
            f"expected a function and arguments that can be pickled, got "
            f"{train!r}: {error}; open files and connections inside of it"
        ) from error


def _supervise(job: Job) -> Any:
    """Runs the supervisor on the head node, and waits for the run's end."""
    if not ray.is_initialized():
        ray.init()
    nodes = (each for each in ray.nodes() if each["Alive"])
    head = next(each["NodeID"] for each in nodes if HEAD in each["Resources"])
    supervisor = (
        ray.remote(Supervisor)
        .options(
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False),
        )
        .remote(job)
    )
    try:
        with _signals_to(supervisor):
            return ray.get(supervisor.run.remote())
    finally:
        ray.kill(supervisor)


@contextlib.contextmanager
def _signals_to(supervisor: Any) -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM (of `ray job stop`) end the run, as under `elche run`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        supervisor.interrupt.remote(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
