"""States of ranks and of their core, each known by a number, and their successors.

A state of the whole run is then a few numbers, and the real code runs once for each
state of a rank or of the core and what comes to it, not for each state of the whole.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, get_args

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.epochs import Epochs
from elche.coordination.policy import EpochTotals
from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import (
    EndEpoch,
    Instruction,
    MetricsReported,
)
from elche.coordination.state import Coordinator
from elche.coordination.story import Story
from elche.coordination.windows.leasing import Leasing, _Pace
from elche.coordination.windows.window_state import WindowState
from elche.sim.cluster import Cluster
from tests.sim.exploring.frozen import Freezer

LEFT_OUT = (
    (Coordinator, "_handlers"),
    (Coordinator, "_story"),
    (Epochs, "_story"),
    (EpochTotals, "_book"),
    (WindowState, "plans"),
    (WindowState, "last"),
    (Leasing, "_by_end"),
    (Leasing, "_by_cost"),
    (_Pace, "version"),
)
"""Of a core: what only was measured, and the order of what `Leasing` has by rank."""
SHARED = (*get_args(Event), *get_args(Instruction), RunConfig, BatchSizes)
MOST_LIVE = 5_000
"""Ranks' scripts that are kept where they are; others are run again."""

Parts = dict[Any, dict[int, Any]]
"""What ranks have sent each other: of each collective, by rank."""


class Process(Protocol):
    """A rank's process, and what is looked at from outside.

    Attributes:
        is_new: it holds no model yet.
        generation: of the group that it is in.
    """

    is_new: bool
    generation: int

    def live(self) -> Generator[None, None, Any]:
        """The script of a rank of the start."""

    def join(self) -> Generator[None, None, Any]:
        """The script of one that comes later."""


class Facts(NamedTuple):
    """What is looked at of a rank's state.

    Attributes:
        is_over: its script has ended.
        model: what is in its model; None: it has none.
        passed: collectives up to this number it reads no more.
        generation: of its group.
    """

    is_over: bool
    model: Hashable
    passed: int
    generation: int


@dataclass(frozen=True)
class Script:
    """How ranks of a run are made, and looked at.

    Attributes:
        cluster: the run.
        process: makes a rank's process: of its seat, its number and the founders.
        facts: its model, and `Facts.passed`.
        keeps: what a rank has sent outlives it surely, as shared memory does.
    """

    cluster: Cluster
    process: Callable[[Any, int, int], Process]
    facts: Callable[[Any], tuple[Hashable, int]]
    keeps: bool


class Seat:
    """One rank's script, and all that it can see of the others.

    Has what the ranks of `tests.coordination.sync.step_world` ask of their world.
    """

    early = kills_source = False

    def __init__(self, script: Script, rank: int) -> None:
        cluster = script.cluster
        self.cluster, self.keeps = cluster, script.keeps
        self.sizes = BatchSizes(cluster.run.sizes)
        self.founders = cluster.world_size
        self.inbox: deque[Instruction] = deque()
        self.inboxes = {rank: self.inbox}
        self.met: Parts = {}
        self.is_over = False
        self._rank, self._facts = rank, script.facts
        self._sent: list[Event] = []
        self._process = process = script.process(self, rank, self.founders)
        is_founder = rank < self.founders
        self._script = process.live() if is_founder else process.join()

    def tell(self, event: Event) -> None:
        """To the core."""
        self._sent.append(event)

    def move(self, met: Parts) -> tuple[dict[Any, Any], tuple[Event, ...]]:
        """Runs to the next yield; returns what it sent to others, and to the core."""
        for parts in self.met.values():
            parts.clear()  # the script may hold it
        for key, parts in met.items():
            self.met.setdefault(key, {}).update(parts)
        before = {
            key: parts[self._rank]
            for key, parts in self.met.items()
            if self._rank in parts
        }
        try:
            next(self._script)
        except StopIteration:
            self.is_over = True
        sent, self._sent = tuple(self._sent), []
        new = {
            key: _copied(parts[self._rank])
            for key, parts in self.met.items()
            if self._rank in parts
            and (key not in before or parts[self._rank] is not before[key])
        }
        return new, sent

    def state(self) -> tuple[Any, Facts]:
        """Where it is, but for what others have sent, which is read anew."""
        tokens = {id(parts): ("met", key) for key, parts in self.met.items()}
        freezer = Freezer({**tokens, id(self): "seat"})
        process = self._process
        frozen = freezer.freeze((process, self.inbox, self._script))
        model, passed = self._facts(process)
        model = None if process.is_new else model
        return frozen, Facts(self.is_over, model, passed, process.generation)


def _copied(value: Any) -> Any:
    """A value that its owner does not change afterwards."""
    if type(value) in (list, tuple):
        return tuple(map(_copied, value))
    return dict(value) if isinstance(value, dict) else value


class RankStates:
    """All states that ranks have come to.

    Args:
        script: of the ranks.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._numbers: dict[Any, int] = {}
        self._ways: list[tuple[int, Any]] = []  # from which state, by what
        self._live: dict[int, Seat] = {}
        self._moved: dict[Any, Any] = {}
        self._received: dict[tuple[int, Instruction], int] = {}
        self.facts: list[Facts] = []

    def start(self, rank: int) -> int:
        """A rank's first state."""
        return self._number(Seat(self._script, rank), (-1, rank))

    def move(
        self, state: int, net: int, met: Parts
    ) -> tuple[int, dict[Any, Any], tuple[Event, ...]]:
        """A rank goes on; returns its next state and what it has sent.

        Args:
            state: of the rank.
            net: the number of ``met``.
            met: what ranks have sent each other.
        """
        known = self._moved.get((state, net))
        if known is None:
            seat = self._seat(state)
            new, sent = seat.move(met)
            after = self._number(seat, (state, met))
            known = self._moved[state, net] = after, new, sent
        return known

    def receive(self, state: int, told: Instruction) -> int:
        """A message comes to a rank's inbox."""
        known = self._received.get((state, told))
        if known is None:
            seat = self._seat(state)
            seat.inbox.append(told)
            known = self._received[state, told] = self._number(seat, (state, told))
        return known

    def _number(self, seat: Seat, way: tuple[int, Any]) -> int:
        frozen, facts = seat.state()
        number = self._numbers.setdefault(frozen, len(self._ways))
        if number == len(self._ways):
            self._ways.append(way)
            self.facts.append(facts)
        if len(self._live) < MOST_LIVE:
            self._live[number] = seat
        return number

    def _seat(self, state: int) -> Seat:
        """A script in this state, run there again if need be."""
        if (live := self._live.pop(state, None)) is not None:
            return live
        ways = [self._ways[state]]
        while ways[-1][0] >= 0:
            ways.append(self._ways[ways[-1][0]])
        seat = Seat(self._script, ways.pop()[1])
        for _, what in reversed(ways):
            if isinstance(what, dict):
                seat.move(what)
            else:
                seat.inbox.append(what)
        return seat


class _Silent(Story):
    """Keeps nothing: how a core has come to a state is not of the state."""

    def received(self, event: Event, now_s: float) -> None:
        pass

    def sent(self, instruction: Instruction, now_s: float) -> None:
        pass

    def decided(self, why: str, now_s: float, rank: int = -1) -> None:
        pass


class CoreStates:
    """All states that the core has come to.

    Two that differ only in what was measured are one.

    Args:
        world_size: ranks of the start.
    """

    def __init__(self, world_size: int) -> None:
        core = Coordinator(world_size, survives=True)
        core._story = _Silent()
        self._numbers: dict[Any, int] = {}
        self._copies: list[bytes] = []
        self._handled: dict[tuple[int, Event], tuple[int, Sequence[Instruction]]] = {}
        self.first = self._number(core)

    def handle(self, state: int, event: Event) -> tuple[int, Sequence[Instruction]]:
        """An event comes; returns the next state, and what is told to whom."""
        known = self._handled.get((state, event))
        if known is None:
            core = self.core(state)
            told = [each for each in map(_bare, core.handle(event, 0.0)) if each]
            core.check()
            assert core.aborted is None, core.aborted
            known = self._handled[state, event] = self._number(core), told
        return known

    def core(self, state: int) -> Coordinator:
        """A core in this state."""
        core: Coordinator = pickle.loads(self._copies[state])
        return core

    def _number(self, core: Coordinator) -> int:
        frozen = Freezer(left_out=LEFT_OUT).freeze(core)
        number = self._numbers.setdefault(frozen, len(self._copies))
        if number == len(self._copies):
            file = io.BytesIO()
            pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
            pickler.dispatch_table = dict.fromkeys(SHARED, _share)
            pickler.dump(core)
            self._copies.append(file.getvalue())
        return number


_shared: list[Any] = []
_shared_numbers: dict[Any, int] = {}


def _share(value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    """What does not change is the same object in all copies: they cost much less."""
    number = _shared_numbers.setdefault(value, len(_shared))
    if number == len(_shared):
        _shared.append(value)
    return _shared_value, (number,)


def _shared_value(number: int) -> Any:
    return _shared[number]


def _bare(told: Instruction) -> Instruction | None:
    """Without what was measured; None where there is nothing else."""
    if isinstance(told, EndEpoch):
        return replace(told, samples=0, sync_s=0.0, anchor=0)
    return None if isinstance(told, MetricsReported) else told
