"""A run in virtual time: a heap of events, a network that delays, the real core.

Workers are generators (`simulated_worker`) that speak the messages of the real ones.
What they wait for they yield; the run resumes them under its virtual clock. After every
event the core's invariants are checked. A heap that runs dry while a worker waits is a
deadlock, unless ticks are on: then time goes on until a deadline passes.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from elche.coordination.messages import (
    Abort,
    Disconnected,
    Event,
    Failed,
    Instruction,
    Reduce,
    Tick,
)
from elche.coordination.state import Coordinator

TICK_S = 0.5
MAX_EVENTS = 400_000


class DeadlockError(AssertionError):
    """Nothing will ever happen again, but a worker waits."""


class AbortedError(Exception):
    """A worker has read an Abort."""


@dataclass(frozen=True)
class Sleep:
    """Resume after so many seconds."""

    duration_s: float


@dataclass(frozen=True)
class Receive:
    """Resume when an instruction is there, or after ``timeout_s``."""

    waiting_for: str
    timeout_s: float | None = None


@dataclass(frozen=True)
class Meet:
    """Resume ``cost_s`` after all ranks have come here."""

    key: tuple[Any, ...]
    cost_s: float


Wait = Sleep | Receive | Meet
Script = Generator[Wait, None, None]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's speed and loader."""

    sample_s: float = 0.01
    fixed_s: float = 0.0
    jitter: float = 0.0
    prefetched: int = 0
    draw_s: float = 0.0
    cold_s: float = 0.0
    break_at: dict[int, int] = field(default_factory=dict)
    fail_at_s: float | None = None
    fail_silently: bool = False
    slower_from_s: float | None = None
    slower_by: float = 1.0

    @property
    def horizon_batches(self) -> int:
        return self.prefetched + 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is simulated."""

    devices: tuple[Device, ...]
    policy: str = "cadence"
    config: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((8, 20),)
    epochs: int = 1
    runs: int = 1
    sync_s: float = 0.01
    delay_s: float = 0.0
    pause_s: float = 0.0
    min_share_samples: int = 1
    seed: int = 0
    ticks: bool = False

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def num_batches(self) -> int:
        return sum(count for _, count in self.sizes)


@dataclass
class Record:
    """What happened."""

    trained: dict[tuple[int, int], list[tuple[int, int, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Per (run, epoch): (rank, batch, first sample of it, one past the last)."""
    plans: dict[tuple[int, int], list[Reduce]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Per (run, window): the plan that each rank reduced by."""
    shares: dict[tuple[int, int, int], set[tuple[int, ...]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Per (run, epoch, step): the splits that ranks were told."""
    in_window: dict[tuple[int, int], dict[int, int]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """Per (run, window): samples that each rank trained on in it."""
    empty_draws: dict[tuple[int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Per (run, epoch): ranks whose loader drew before anything was granted."""
    busy: list[tuple[int, float, float]] = field(default_factory=list)
    """(rank, start, end) of all computing, in seconds."""
    waits: list[tuple[int, str, float, float]] = field(default_factory=list)
    """(rank, for what, since, until) of waits for an instruction."""
    opened: dict[tuple[int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Per (run, rank): windows in the order of their opening."""
    ended: dict[tuple[int, int], set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Per (run, epoch): ranks that were told the end."""
    last_work_s: dict[tuple[int, int], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    aborts: dict[int, Abort] = field(default_factory=dict)
    aborted_s: dict[int, float] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


class Worker:
    """What the run knows of one rank's process."""

    def __init__(self, rank: int, script: Script) -> None:
        self.rank = rank
        self.script = script
        self.inbox: list[Instruction] = []
        self.wait: Wait | None = None
        self.since_s = 0.0
        self.alive = True


class Simulation:
    """Runs a plan to its end.

    Args:
        plan: what is simulated.
        script: makes a rank's script; see `simulated_worker.script`.
    """

    def __init__(self, plan: Plan, script: Callable[[Simulation, int], Script]) -> None:
        self.plan = plan
        self.core = Coordinator(plan.world_size)
        self.record = Record()
        self.now_s = 0.0
        self.rng = random.Random(plan.seed)
        self.events: list[Event] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._arrival: dict[tuple[str, int], float] = {}
        self._meetings: dict[tuple[Any, ...], set[int]] = {}
        self.workers = [Worker(r, script(self, r)) for r in range(plan.world_size)]

    def run(self) -> Record:
        """Simulates until every worker has ended.

        Raises:
            DeadlockError: a worker waits for ever.
        """
        for worker in self.workers:
            self._at(self._jittered_start(), lambda w=worker: self._resume(w))
            fail_s = self.plan.devices[worker.rank].fail_at_s
            if fail_s is not None:
                self._at(fail_s, lambda w=worker: self._fail(w))
        if self.plan.ticks:
            self._at(TICK_S, self._tick)
        for _ in range(MAX_EVENTS):
            if not self._heap:
                break
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        else:
            raise DeadlockError(f"no end after {MAX_EVENTS} events\n{self._where()}")
        if any(worker.alive for worker in self.workers):
            raise DeadlockError(self._where())
        return self.record

    def send(self, event: Event) -> None:
        """A worker's message travels to the core."""
        self._travel("up", event.rank, lambda: self._take(event))

    def next_instruction(self, worker: Worker) -> Instruction | None:
        """What a worker finds in its inbox."""
        if not worker.inbox:
            return None
        instruction = worker.inbox.pop(0)
        if isinstance(instruction, Abort):
            self.record.aborts[worker.rank] = instruction
            self.record.aborted_s[worker.rank] = self.now_s
            raise AbortedError
        return instruction

    def _jittered_start(self) -> float:
        return self.rng.uniform(0.0, self.plan.delay_s)

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, action))

    def _travel(self, way: str, rank: int, arrive: Callable[[], None]) -> None:
        """Delays a message; messages of one channel keep their order."""
        at_s = self.now_s + self.rng.uniform(0.0, self.plan.delay_s)
        at_s = max(at_s, self._arrival.get((way, rank), 0.0))
        self._arrival[way, rank] = at_s
        self._at(at_s, arrive)

    def _take(self, event: Event) -> None:
        self.events.append(event)
        for instruction in self.core.handle(event, self.now_s):
            self._travel(
                "down", instruction.rank, lambda i=instruction: self._arrive(i)
            )
        self.core.check()

    def _arrive(self, instruction: Instruction) -> None:
        worker = self.workers[instruction.rank]
        if not worker.alive:
            return
        worker.inbox.append(instruction)
        aborted = isinstance(instruction, Abort)
        if isinstance(worker.wait, Receive) or (
            aborted and isinstance(worker.wait, Meet)
        ):
            self._resume(worker)

    def _tick(self) -> None:
        if any(worker.alive for worker in self.workers):
            self._take(Tick())
            self._at(self.now_s + TICK_S, self._tick)

    def _resume(self, worker: Worker) -> None:
        if not worker.alive:
            return
        wait, worker.wait = worker.wait, None
        if isinstance(wait, Receive):
            self.record.waits.append(
                (worker.rank, wait.waiting_for, worker.since_s, self.now_s)
            )
        try:
            if isinstance(wait, Meet) and any(
                isinstance(item, Abort) for item in worker.inbox
            ):
                worker.inbox = [i for i in worker.inbox if isinstance(i, Abort)]
                self.next_instruction(worker)
            self._suspend(worker, next(worker.script))
        except StopIteration:
            self.record.finished.add(worker.rank)
            worker.alive = False
        except AbortedError:
            worker.alive = False
            self._travel("up", worker.rank, lambda: self._lost(worker.rank))

    def _suspend(self, worker: Worker, wait: Wait) -> None:
        worker.wait, worker.since_s = wait, self.now_s
        if isinstance(wait, Sleep):
            self._wake(worker, wait.duration_s)
        elif isinstance(wait, Meet):
            if any(isinstance(item, Abort) for item in worker.inbox):
                self._resume(worker)
                return
            there = self._meetings.setdefault(wait.key, set())
            there.add(worker.rank)
            if len(there) == self.plan.world_size:
                del self._meetings[wait.key]
                for other in self.workers:
                    self._wake(other, wait.cost_s)
        elif worker.inbox:
            self._resume(worker)
        elif wait.timeout_s is not None:
            self._wake(worker, wait.timeout_s)

    def _wake(self, worker: Worker, after_s: float) -> None:
        wait = worker.wait

        def wake() -> None:
            if worker.wait is wait:
                self._resume(worker)

        self._at(self.now_s + after_s, wake)

    def _fail(self, worker: Worker) -> None:
        """The process dies, with or without a word."""
        if not worker.alive:
            return
        worker.alive = False
        if not self.plan.devices[worker.rank].fail_silently:
            failed = Failed(rank=worker.rank, error="ValueError: x", traceback="T")
            self.send(failed)
        self._travel("up", worker.rank, lambda: self._lost(worker.rank))

    def _lost(self, rank: int) -> None:
        self._take(Disconnected(rank=rank))

    def _where(self) -> str:
        lines = [
            f"rank {w.rank} waits since {w.since_s:.3f} s: {w.wait}, inbox {w.inbox}"
            for w in self.workers
            if w.alive
        ]
        story = "\n".join(self.core.story()[-40:])
        return "\n".join([f"at {self.now_s:.3f} s", *lines, "story:", story])
