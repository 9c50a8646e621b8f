"""Ranks as processes on the nodes of a Ray cluster; see `RankBackend`.

Each rank has an actor, `RankHost`, which starts the rank's process on the node where
Ray placed it. A process of its own has signals, an exit code and a main thread as under
`elche run`, and the same code watches it. It ends with the actor, and the actor with
its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
)
from ray.util.placement_group import remove_placement_group as remove_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elche.comm.control.addresses import listen
from elche.ray.rank_specs import Job, RankSpec
from elche.runtime.process.launch_config import LaunchConfig
from elche.runtime.process.local_ranks import inherited_environment
from elche.runtime.process.rank_processes import RankProcess

logger = logging.getLogger(__name__)

MAIN: Final = "elche.launching.remote_rank"
RESULT_S: Final = 5.0
"""Deadline (s) to read the result of a process that has ended."""
FENCE_S: Final = 1.0
"""Deadline (s) of a node to confirm that a rank's process was killed.

A rank that cannot reach the coordinator ends itself soon after; see `UNREACHABLE_S`.
"""
LOOK_S: Final = 0.2
"""Poll interval (s) while a node lacks room for one of the first ranks."""
AGAIN_S: Final = 1.0
"""Pause (s) before another actor is requested."""
SAY_S: Final = 10.0
"""Wait (s) for room on a node before a line names the rank."""
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
        self._config, self._job = config, job
        self._hosts: dict[int, Any] = {}
        self._processes: list[RayProcess] = []
        self.results: dict[int, bytes] = {}
        self._places = [*map(_reserve, specs)]

    def add(self, spec: RankSpec) -> int:
        """Adds a place; returns its number."""
        self._places.append(_reserve(spec))
        return len(self._places) - 1

    def move(self, place: int, spec: RankSpec) -> None:
        """Moves a place to another node: a rank that waits there starts on it."""
        remove_group(self._places[place][1])
        self._places[place] = _reserve(spec)
        self._drop(place)

    def listen(self) -> socket.socket:
        """See `RankBackend`."""
        return listen(get_node_ip_address(), 0)

    async def start(
        self, rank: int, place: int, environment: dict[str, str]
    ) -> RankProcess:
        """See `RankBackend`."""
        if not self._places[place][0].resources.get("GPU"):
            environment.setdefault("ELCHE_DEVICE", "cpu")
        process = RayProcess(lambda own: self._run(own, rank, place, environment))
        self._processes.append(process)
        return process

    async def _run(
        self, process: RayProcess, rank: int, place: int, environment: dict[str, str]
    ) -> int:
        """Starts a rank's process, and waits for its end; returns its exit code."""
        spec, start_s = self._places[place][0], self._job.start_s
        room = f"a node with {dict(spec.resources)} free"
        if spec.label_selector:
            room += f" and labels {dict(spec.label_selector)}"
        loop, code = asyncio.get_running_loop(), None
        saying = loop.call_later(
            SAY_S, logger.warning, "rank %d waits for %s", rank, room
        )
        try:
            is_first = rank < self._config.world_size
            starting = self._begin(process, place, environment, is_first)
            await asyncio.wait_for(starting, start_s if is_first else None)
            saying.cancel()
            code, self.results[rank] = await process.host.wait.remote()
            return int(code)
        except asyncio.TimeoutError:
            trouble = process.trouble or f"Ray has not found {room}"
            why = f"it was not started in {start_s:g} s: {trouble}"
        except ValueError as error:
            why = f"Ray refuses {dict(spec.resources)}: {error}"
        except RayTaskError as error:
            why = f"its process cannot be started: {error.cause}"
        except RayError as error:
            logger.warning("rank %d: its node or actor has died: %s", rank, error)
            return KILLED
        finally:
            saying.cancel()
            if code is None:
                self._drop(place)
        logger.error("rank %d: %s", rank, why)
        self.results[rank] = pickle.dumps((None, why, ""))
        return 1

    async def _begin(
        self,
        process: RayProcess,
        place: int,
        environment: dict[str, str],
        is_first: bool,
    ) -> None:
        """Starts a process as soon as a node has room; the first ones together."""
        while is_first and not self._have_room():
            await asyncio.sleep(LOOK_S)
        command, call = self._config.command, self._job.call
        while not process.has_started:
            host = process.host = self._host(place)
            try:
                await host.start.remote(command, call, environment)
                process.has_started = True
            except RayTaskError:  # it would fail again
                raise
            except RayError as error:  # a node that Ray still thinks alive, or a move
                process.trouble = f"its actor has died before it began: {error}"
                logger.info("%s", process.trouble)
                self._drop(place)
                await asyncio.sleep(AGAIN_S)

    def _have_room(self) -> bool:
        found = placement_group_table()
        ids = [group.id.hex() for _, group in self._places]
        return all(found[each]["state"] == "CREATED" for each in ids)

    async def fence(self, process: RankProcess) -> None:
        """See `RankBackend`; a node that does not confirm the kill counts as dead."""
        assert isinstance(process, RayProcess)
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await asyncio.wait([process.running], timeout=FENCE_S)
        if process.returncode is None:
            process.give_up(KILLED)

    def end_waiting(self) -> None:
        """See `RankBackend`."""
        for each in self._processes:
            if not each.has_started and each.returncode is None:
                each.give_up(-signal.SIGTERM)

    def _host(self, place: int) -> Any:
        """Returns the actor of a place; Ray starts it when a node has room."""
        if place not in self._hosts:
            spec, group = self._places[place]
            named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
            options: dict[str, Any] = {"num_cpus": 0}
            options |= {named[k]: v for k, v in spec.resources.items() if k in named}
            rest = {k: v for k, v in spec.resources.items() if k not in named}
            where = PlacementGroupSchedulingStrategy(group)
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
        for _, group in self._places:
            remove_group(group)


def _reserve(spec: RankSpec) -> tuple[RankSpec, PlacementGroup]:
    """Requests a placement group for one rank: it survives the loss of other nodes."""
    labels = [dict(spec.label_selector)]
    return spec, placement_group([dict(spec.resources)], bundle_label_selector=labels)


@final
class RayProcess:
    """A rank's process on a node, or waiting for a node.

    Args:
        run: starts the process, waits for its end, and returns its exit code.

    Attributes:
        host: its actor.
        has_started: False while it waits for a node.
        trouble: why its last actor died before the start; "" if none did.
        returncode: see `RankProcess`.
        running: task from its start to its end.
    """

    pid = None

    def __init__(self, run: Callable[[RayProcess], Any]) -> None:
        self.host: Any = None
        self.has_started = False
        self.returncode: int | None = None
        self.trouble = ""
        self.running: asyncio.Task[int] = asyncio.ensure_future(run(self))
        self.running.add_done_callback(self._note_end)

    def send_signal(self, number: int, /) -> None:
        """See `RankProcess`."""
        if self.has_started:
            self.host.send_signal.remote(number)
        else:
            self.give_up(-number)

    async def wait(self) -> int:
        """See `RankProcess`."""
        await asyncio.wait([self.running])  # after `_note_end`
        return self.returncode or 0

    def give_up(self, code: int) -> None:
        """Treats the process as ended, and kills its actor."""
        self.returncode = code
        self.running.cancel()

    def _note_end(self, running: asyncio.Task[int]) -> None:
        if not running.cancelled():
            error = running.exception()
            if error is not None:
                logger.error("a rank cannot be started or watched", exc_info=error)
            self.returncode = running.result() if error is None else 1


@final
class RankHost:
    """Starts, signals and awaits a place's processes, one at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Future[bytes] | None = None

    async def start(
        self, command: tuple[str, ...], call: bytes, environment: dict[str, str]
    ) -> None:
        """Starts a rank's process.

        Args:
            command: a script and its arguments; () calls a function.
            call: the function and its arguments, pickled.
            environment: variables of the rank.
        """
        here = {
            **inherited_environment(1),
            "ELCHE_LISTEN": get_node_ip_address(),
            "ELCHE_HOST": ray.get_runtime_context().get_node_id(),
            "LOCAL_RANK": "0",  # Ray shows a rank its own devices alone
            "LOCAL_WORLD_SIZE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
        }
        ours, theirs = socket.socketpair()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MAIN),
            *(str(theirs.fileno()), str(os.getpid()), *command),
            env=here | environment,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(call)
        writer.write_eof()
        self._reading = asyncio.ensure_future(_read(reader, writer))

    async def wait(self) -> tuple[int, bytes]:
        """Exit code of the process (negative for a signal), and its result."""
        assert self._process is not None
        assert self._reading is not None
        code = await self._process.wait()
        # Processes that it left behind may hold the socket open.
        await asyncio.wait([self._reading], timeout=RESULT_S)
        return code, self._reading.result() if self._reading.done() else b""

    async def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it has not ended."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.Signals(number))


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""
