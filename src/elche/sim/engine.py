"""A virtual clock, a network that delays messages, and collectives that may fail.

Processes are generators. They yield what they wait for (seconds, `Receive`, or a
`Collective`), and are resumed under the virtual clock. This module does not depend on
training. Pure.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from elche.coordination.protocol.instructions import Abort, Instruction, Regroup
from elche.errors import ElcheError
from elche.sim.cluster import Cluster


class DeadlockError(ElcheError):
    """No event is left, but a simulated rank waits."""


class AbortedError(ElcheError):
    """A simulated rank has received an `Abort`."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for an instruction, at most ``timeout_s``."""

    waiting_for: str
    timeout_s: float | None = None


class Collective:
    """Collective operation of all members of a group.

    It ends ``cost_s`` after the last arrival, or earlier if ranks could send parts
    before: each rank passes the time at which its first part was ready. Ranks receive
    the result one after the other. If a member dies, the operation fails on members
    without the result, and on ranks that are notified of a death while they wait.

    Args:
        members: ranks that take part.
        cost_s: time (s) of the whole operation.
        parts: number of parts that can be sent separately.
    """

    __slots__ = ("arrived", "cost_s", "done_s", "failed", "members", "parts", "value")

    def __init__(self, members: Iterable[int], cost_s: float, parts: int = 1) -> None:
        self.members = frozenset(members)
        self.cost_s = cost_s
        self.parts = parts
        self.arrived: dict[int, tuple[float, float]] = {}
        self.done_s: dict[int, float] = {}
        self.failed = False
        self.value: Any = None

    @property
    def last_arrival_s(self) -> float:
        """Arrival time of the last member."""
        return max(end_s for _, end_s in self.arrived.values())

    def ends_s(self) -> float:
        """Returns the end of the collective, once all members have arrived."""
        ready_s = max(ready_s for ready_s, _ in self.arrived.values())
        return max(
            self.last_arrival_s + self.cost_s / self.parts, ready_s + self.cost_s
        )


Wait = float | Receive | Collective
Script = Generator[Wait, Any, None]


@dataclass(slots=True)
class SimulatedProcess:
    """State of one rank's process in the engine."""

    rank: int
    script: Script
    inbox: deque[Instruction] = field(default_factory=deque)
    wait: Wait | None = None
    turn: int = 0
    since_s: float = 0.0
    is_alive: bool = True
    is_hung: bool = False


class Engine:
    """Runs simulated processes under a virtual clock.

    Args:
        cluster: description with the times of messages and collectives.
        on_end: called when a process ends, with its rank and whether it was aborted.

    Attributes:
        link: the current link.
    """

    def __init__(self, cluster: Cluster, on_end: Callable[[int, bool], None]) -> None:
        self.cluster = cluster
        self.now_s = 0.0
        self.processes: dict[int, SimulatedProcess] = {}
        self.collectives: dict[tuple[Any, ...], Collective] = {}
        self._on_end = on_end
        self._random = random.Random(cluster.run.seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._last_arrival_s: dict[tuple[str, int], float] = {}
        self.link = cluster.link_at(0.0)
        for change in cluster.link_changes:
            link = cluster.link_at(change.at_s)
            self.at(change.at_s, setattr, self, "link", link)

    def at(self, when_s: float, act: Callable[..., None], *args: Any) -> None:
        """Schedules a call at a point of simulated time."""
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, act, args))

    def run(
        self, until_s: float | None = None, most_happenings: float = math.inf
    ) -> None:
        """Runs until no event is left, or until a time.

        Raises:
            DeadlockError: a process waits for ever, or there are too many events.
        """
        heap = self._heap
        while heap:
            if self._count > most_happenings:
                raise DeadlockError(
                    f"at {self.now_s:.6f} s: over {most_happenings} events"
                )
            when_s, _, act, args = heapq.heappop(heap)
            if until_s is not None and when_s > until_s:
                self.now_s = until_s
                return
            self.now_s = when_s
            act(*args)
        waiting = [p for p in self.processes.values() if p.is_alive and not p.is_hung]
        if waiting:
            raise DeadlockError(
                f"at {self.now_s:.6f} s no event is left, but "
                + "; ".join(
                    f"rank {p.rank} waits since {p.since_s:.6f} s for "
                    f"{_shown(p.wait, p.rank)}"
                    for p in waiting[:8]
                )
            )

    def start(self, rank: int, script: Script, after_s: float = 0.0) -> None:
        """Starts a process."""
        process = SimulatedProcess(rank, script)
        self.processes[rank] = process
        self._wake_at(self.now_s + after_s, process, None)

    def travel(self, way: str, rank: int, act: Callable[..., None], *args: Any) -> None:
        """Calls ``act`` when a message arrives; each channel's messages keep order."""
        link = self.link
        at_s = self.now_s + link.latency_s
        if link.spread_s:
            at_s += self._random.uniform(0.0, link.spread_s)
            channel = (way, rank)
            at_s = max(at_s, self._last_arrival_s.get(channel, 0.0))
            self._last_arrival_s[channel] = at_s
        self.at(at_s, act, *args)

    def deliver(self, instruction: Instruction) -> None:
        """Delivers an instruction to its rank."""
        process = self.processes[instruction.rank]
        if not process.is_alive or process.is_hung:
            return
        process.inbox.append(instruction)
        wait = process.wait
        if isinstance(wait, Receive):
            self._wake(process, process.turn, None)
        elif isinstance(wait, Collective) and self._breaks_off(process, wait):
            self._wake(process, process.turn, False)

    def arrive(
        self,
        key: tuple[Any, ...],
        rank: int,
        new: Callable[[], Collective],
        ready_s: float | None = None,
    ) -> Collective:
        """Adds a rank to a collective; the process yields it to wait for its end.

        ``ready_s`` is the time at which the rank's first part was ready; None is now.
        """
        collective = self.collectives.get(key)
        if collective is None:
            collective = self.collectives[key] = new()
            there = {r for r, one in self.processes.items() if one.is_alive}
            collective.failed = not collective.members <= there
        assert rank in collective.members, f"rank {rank} is not in {key}"
        assert rank not in collective.arrived, f"rank {rank} is twice in {key}"
        began_s = self.now_s if ready_s is None else ready_s
        collective.arrived[rank] = (began_s, self.now_s)
        if len(collective.arrived) == len(collective.members) and not collective.failed:
            self._complete(key, collective)
        return collective

    def kill(self, rank: int) -> None:
        """Kills a process; its collectives fail."""
        process = self.processes[rank]
        process.is_alive = False
        process.script.close()
        for key, collective in list(self.collectives.items()):
            if rank not in collective.members:
                continue
            seen = {r: at for r, at in collective.done_s.items() if at <= self.now_s}
            if len(seen) == len(collective.members):
                del self.collectives[key]
                continue
            collective.failed = True
            collective.done_s = seen
            for other in collective.arrived:
                self._fail_later(other, collective)

    def _fail_later(self, rank: int, collective: Collective) -> None:
        process = self.processes[rank]
        waits = process.is_alive and process.wait is collective
        if waits and rank not in collective.done_s:
            process.turn += 1  # cancels its scheduled wake-up with a result
            self._wake_at(self.now_s + self.link.latency_s, process, False)

    def _complete(self, key: tuple[Any, ...], collective: Collective) -> None:
        ends_s = max(self.now_s, collective.ends_s())
        link, draw = self.link, self._random
        skew_s = link.latency_s + link.spread_s if len(collective.members) > 1 else 0.0
        last_s = ends_s
        for rank in collective.members:
            done_s = ends_s + draw.random() * skew_s if skew_s else ends_s
            collective.done_s[rank] = done_s
            last_s = max(last_s, done_s)
            process = self.processes[rank]
            if process.wait is collective:
                self._wake_at(done_s, process, True)
        self.at(last_s, self._forget, key, collective)

    def _forget(self, key: tuple[Any, ...], collective: Collective) -> None:
        if not collective.failed and self.collectives.get(key) is collective:
            del self.collectives[key]

    def _wake_at(self, at_s: float, process: SimulatedProcess, value: object) -> None:
        self.at(at_s, self._wake, process, process.turn, value)

    def _wake(self, process: SimulatedProcess, turn: int, value: object) -> None:
        """Resumes a process, unless it was resumed since this call was scheduled."""
        if process.turn != turn or not process.is_alive or process.is_hung:
            return
        process.wait = None
        process.turn += 1
        try:
            wait = process.script.send(value)
            while isinstance(wait, Receive) and process.inbox:
                wait = process.script.send(None)
        except (StopIteration, AbortedError) as end:
            process.is_alive = False
            self._on_end(process.rank, isinstance(end, AbortedError))
            return
        self._suspend(process, wait)

    def _suspend(self, process: SimulatedProcess, wait: Wait) -> None:
        process.wait, process.since_s = wait, self.now_s
        if isinstance(wait, Receive):
            if wait.timeout_s is not None:
                self._wake_at(self.now_s + wait.timeout_s, process, None)
        elif isinstance(wait, Collective):
            done_s = wait.done_s.get(process.rank)
            if done_s is not None:
                self._wake_at(max(done_s, self.now_s), process, True)
            elif wait.failed:
                self._wake_at(self.now_s + self.link.latency_s, process, False)
            elif self._breaks_off(process, wait):
                self._wake_at(self.now_s, process, False)
        else:
            self._wake_at(self.now_s + wait, process, None)

    def _breaks_off(self, process: SimulatedProcess, wait: Collective) -> bool:
        """True if a received instruction ends the wait."""
        words = (Abort,) if process.rank in wait.done_s else (Abort, Regroup)
        return any(isinstance(item, words) for item in process.inbox)


def _shown(wait: Wait | None, rank: int) -> str:
    if isinstance(wait, Receive):
        return wait.waiting_for
    if isinstance(wait, Collective):
        missing = sorted(wait.members - wait.arrived.keys())
        return f"a collective of {len(wait.members)} ranks, missing {missing[:8]}"
    return "the time to pass"
