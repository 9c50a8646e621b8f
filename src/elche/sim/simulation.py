"""A whole run in virtual time: real coordinator, simulated ranks, faults. Pure."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.protocol.events import Event, Failed, RankLost, Tick
from elche.coordination.protocol.instructions import (
    BeginEpoch,
    EndEpoch,
    Instruction,
    PolicyChosen,
    Reduce,
    Regroup,
    Welcome,
)
from elche.coordination.state import Coordinator
from elche.errors import ElcheError
from elche.sim.cluster import Cluster, Device, Fault
from elche.sim.history import History, RankHistory
from elche.sim.rank import Rank, World
from elche.sim.sync_worker import SimulatedSyncEpoch
from elche.sim.window_worker import SimulatedWindowEpoch

TICK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Options of a simulation that do not change its run.

    Attributes:
        books: creates the account of every rank's model, for each run. The core's
            invariants are then asserted after each event. Slow, for tests.
        details: keep a timeline (`History`) and all messages.
        timer: clock (s) that measures the coordinator.
        most_happenings: most simulated events before giving up, against endless loops.
    """

    books: Callable[[int], Any] | None = None
    details: bool = False
    timer: Callable[[], float] | None = None
    most_happenings: float = math.inf


@dataclass(slots=True)
class CoordinatorLoad:
    """Load of the coordinator.

    Attributes:
        events: number of events that it handled.
        instructions: number of instructions that it sent.
        most_instructions: most instructions for one event.
        busy_s: measured time (s) in the core, 0.0 without a timer.
        longest_s: longest time (s) of one event.
    """

    events: int = 0
    instructions: int = 0
    most_instructions: int = 0
    busy_s: float = 0.0
    longest_s: float = 0.0

    def count(self, spent_s: float, instructions: int) -> None:
        """Adds one event."""
        self.events += 1
        self.instructions += instructions
        self.most_instructions = max(self.most_instructions, instructions)
        self.busy_s += spent_s
        self.longest_s = max(self.longest_s, spent_s)


class Simulation(World):
    """Runs a cluster description to its end.

    Args:
        cluster: description of the simulation.
        watch: recording and checking options.
    """

    def __init__(self, cluster: Cluster, watch: Watch | None = None) -> None:
        self.watch = watch or Watch()
        super().__init__(cluster, History(details=self.watch.details))
        self.core = Coordinator(cluster.world_size, survives=True)
        self.load = CoordinatorLoad()
        self.messages: list[tuple[float, Event | Instruction]] = []
        self.devices: dict[int, Device] = {}
        self._began: dict[tuple[int, int], set[int]] = {}
        self._random = random.Random(f"{cluster.run.seed}/faults")
        if self.watch.books is not None:
            self.books = [*map(self.watch.books, range(cluster.run.runs))]
        for fault in cluster.faults:
            self.engine.at(fault.at_s, self._happen, fault)
        for rank, device in enumerate(cluster.ranks):
            spread_s = cluster.run.start_spread_s
            self._start(rank, device, self._random.uniform(0.0, spread_s))
        if any(fault.hang_rank is not None for fault in cluster.faults):
            self.engine.at(TICK_S, self._tick)

    def run(self) -> History:
        """Simulates to the end.

        Raises:
            DeadlockError: ranks wait for something that can never happen.
        """
        try:
            self.engine.run(self.cluster.run.until_s, self.watch.most_happenings)
        except ElcheError as error:
            story = "\n".join(self.core.story()[-40:])
            raise type(error)(f"{error}\nstory:\n{story}") from error
        for sums in self.history.ranks.values():
            if sums.ended_s is None:
                sums.ended_s = self.engine.now_s
        return self.history

    @property
    def end_s(self) -> float:
        """Time at which the last rank ended."""
        ends = [sums.ended_s for sums in self.history.ranks.values()]
        return max((end for end in ends if end is not None), default=0.0)

    @property
    def alive(self) -> list[int]:
        """Ranks whose processes run."""
        return sorted(r for r, p in self.engine.processes.items() if p.is_alive)

    def _epoch_of(self, rank: Rank, begin: BeginEpoch) -> Generator[Any, Any, EndEpoch]:
        self._began.setdefault((rank.run, begin.epoch), set()).add(rank.rank)
        if begin.policy == "sync":
            return (yield from SimulatedSyncEpoch(rank, begin).train())
        return (yield from SimulatedWindowEpoch(rank, begin).train())

    def epoch_ended(self, run: int, epoch: int, rank: int) -> None:
        """Records an epoch's end on a rank; after the last rank, compares models."""
        self.history.ended[run, epoch].add(rank)
        self._compare_models()

    def _compare_models(self) -> None:
        """Compares the models of epochs that all living ranks have ended."""
        if not self.books:
            return
        for (run, epoch), began in self._began.items():
            if (run, epoch) in self.history.committed:
                continue
            there = [rank for rank in began if self.engine.processes[rank].is_alive]
            if there and self.history.ended[run, epoch].issuperset(there):
                whole = not any(e == epoch for _, e in self._breaks)
                sizes = BatchSizes(self.cluster.run.sizes)
                self.history.committed[run, epoch] = self.books[run].check_epoch(
                    there, epoch, sizes, whole=whole
                )

    def is_rejected(self, rank: int) -> bool:
        """True if a rank was still waiting to join when the run ended."""
        sums = self.history.ranks[rank]
        return (
            rank >= self.cluster.world_size
            and rank in self.history.aborts
            and (sums.batches == 0)
        )

    def _start(self, rank: int, device: Device, after_s: float) -> None:
        self.history.ranks[rank] = RankHistory(
            rank=rank, device=device.name, began_s=self.engine.now_s
        )
        self.devices[rank] = device
        is_new = rank >= self.cluster.world_size
        script = Rank(self, rank, device, self._epoch_of, is_new=is_new).live()
        self.engine.start(rank, script, after_s)

    def receive(self, event: Event) -> None:
        """Passes an event to the core and sends its instructions to the ranks."""
        now_s, timer = self.engine.now_s, self.watch.timer or float  # 0.0
        began_s = timer()
        replies = self.core.handle(event, now_s)
        self.load.count(timer() - began_s, len(replies))
        self._note(replies)
        for instruction in replies:
            engine = self.engine
            engine.travel("down", instruction.rank, engine.deliver, instruction)
        if self.watch.details:
            self.messages += [(now_s, message) for message in (event, *replies)]
        if self.books:
            self.core.check()

    def _note(self, replies: list[Instruction]) -> None:
        """Records groups of generations, plans of reductions, and policies."""
        now_s, groups = self.engine.now_s, defaultdict[int, set[int]](set)
        for one in replies:
            match one:
                case Welcome() | Regroup():
                    groups[one.generation].add(one.rank)
                case Reduce() if self.books:
                    self.plans.setdefault(one.window, {})[one.rank] = one
                case PolicyChosen():
                    self.history.choices.append((now_s, one))
                case BeginEpoch():
                    self.history.begin_phase(one.policy, now_s)
        for generation, members in groups.items():
            # A newcomer's `Welcome` names a group that was formed already, without it.
            self.groups.setdefault(generation, frozenset(members))

    def ended(self, rank: int, by_abort: bool) -> None:
        """Records that a process has ended by itself."""
        self.history.ranks[rank].ended_s = self.engine.now_s
        if by_abort:
            self.engine.travel("up", rank, self.receive, RankLost(rank=rank))
        else:
            self.history.finished.add(rank)

    def _tick(self) -> None:
        if any(p.is_alive and not p.is_hung for p in self.engine.processes.values()):
            self.receive(Tick())
            self.engine.at(self.engine.now_s + TICK_S, self._tick)

    def _happen(self, fault: Fault) -> None:
        if fault.join is not None:
            device = fault.join
            if isinstance(device, int):
                device = self.cluster.devices[device]
            if self.alive:
                rank = len(self.devices)
                self.history.changed(rank, self.engine.now_s, [*self.alive, rank])
                self._start(rank, device, 0.0)
            return
        assert fault.rank is not None, "checked when the fault was made"
        process = self.engine.processes.get(fault.rank)
        if process is None or not process.is_alive:
            return
        if fault.hang_rank is not None:
            process.is_hung = True
            self.history.ranks[fault.rank].has_died = True
            return
        if fault.fail_rank is not None:
            self.send(Failed(rank=fault.rank, error="ValueError: x", traceback="T"))
        self.engine.kill(fault.rank)
        self._compare_models()
        sums = self.history.ranks[fault.rank]
        sums.ended_s, sums.has_died = self.engine.now_s, True
        self.history.changed(fault.rank, self.engine.now_s, self.alive)
        self.engine.travel("up", fault.rank, self.receive, RankLost(rank=fault.rank))
