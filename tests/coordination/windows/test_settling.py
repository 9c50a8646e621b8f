"""A death in any order of what ranks and coordinator do: the survivors settle it.

Messages are delayed, sums arrive at some ranks and not at others, and ranks do their
steps in any order. What a rank does here is what `elche.runtime.epochs.window_epoch`
and `elche.runtime.windows.regrouping` do with sockets and collectives.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import pytest

from elche.cadence.rank_time import RankTime
from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes
from elche.coordination.protocol.events import (
    EpochOpened,
    RankLost,
    Regrouped,
    WindowReduced,
)
from elche.coordination.protocol.instructions import (
    BeginEpoch,
    CloseWindow,
    GrantBatches,
    Instruction,
    MetricsReported,
    Reduce,
    Regroup,
)
from elche.coordination.state import Coordinator
from elche.coordination.windows.window_loop import Action, Do, WindowLoop
from tests.coordination.test_core import (
    batch_done,
    closed,
    join_of,
    plan_of,
    reduced,
)

BATCHES, SIZE = 20, 8
MOST_STEPS = 20_000
STEP_S = 0.002
Script = Generator[Callable[[], bool], None, None]


@dataclass
class Sum:
    """One reduction in one group; who has its result, when all have sent their part."""

    members: frozenset[int]
    parts: dict[int, list[int]] = field(default_factory=dict)
    has: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)

    @property
    def is_sent(self) -> bool:
        return self.parts.keys() >= self.members

    @property
    def batches(self) -> list[int]:
        return [batch for part in self.parts.values() for batch in part]


@dataclass
class Forming:
    """What the members of a new group tell each other in it."""

    offers: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    models: dict[int, list[int]] = field(default_factory=dict)


class World:
    """A run of one epoch, in which everything that can happen next may.

    Args:
        policy: ``"cadence"`` or ``"async"``.
        ranks: how many.
        seed: of the order, and of who dies when.
    """

    def __init__(self, policy: str, ranks: int, seed: int) -> None:
        self.random = random.Random(f"{policy} {ranks} {seed}")
        self.now_s = 0.0
        self.core = Coordinator(ranks, survives=True)
        self.groups = {0: frozenset(range(ranks))}
        self.sums: dict[tuple[int, int], Sum] = {}
        self.forming: dict[int, Forming] = {}
        self.to_core: dict[int, deque[Any]] = {r: deque() for r in range(ranks)}
        self.to_rank: dict[int, deque[Instruction]] = {r: deque() for r in range(ranks)}
        self.seen: Counter[str] = Counter()
        plan = plan_of(policy, ranks)  # 20 batches
        for rank in range(ranks):
            self.core.handle(join_of(plan, rank), 0.0)
        for rank in range(ranks):
            opened = EpochOpened(rank=rank, epoch=0, sizes=plan.run.sizes)
            self._deliver(self.core.handle(opened, 0.0))
        self.ranks = {r: Rank(self, r, policy == "async") for r in range(ranks)}
        self.scripts = {rank: each.live() for rank, each in self.ranks.items()}
        self.blocked: dict[int, Callable[[], bool]] = {}
        count = min(ranks - 1, self.random.choice((1, 1, 2)))
        victims = self.random.sample(range(1, ranks), count)
        first = self.random.randrange(10, 250)
        steps = first, first + self.random.randrange(1, 60)
        self.deaths = deque(zip(steps, victims, strict=False))
        self._dies_in_sum = self.random.random() < 0.7

    def _deliver(self, told: list[Instruction]) -> None:
        for one in told:
            if isinstance(one, Regroup):
                left = frozenset(one.left)
                before = self.groups[max(g for g in self.groups if g < one.generation)]
                self.groups.setdefault(one.generation, before - left)
            self.to_rank[one.rank].append(one)

    def run(self) -> None:
        """To the end, where all that live have ended."""
        for step in range(MOST_STEPS):
            self.now_s += STEP_S
            if self.deaths and step >= self.deaths[0][0] and self._is_time:
                self._kill(self.deaths.popleft()[1])
            choices = self._choices()
            if not choices:
                break
            self.random.choice(choices)()
        assert not self.scripts, f"{sorted(self.scripts)} wait for ever"

    @property
    def _is_time(self) -> bool:
        """Most die while some have a sum and others not."""
        is_split = any(0 < len(s.has) < len(s.members) for s in self.sums.values())
        return is_split or not self._dies_in_sum

    def _choices(self) -> list[Callable[[], None]]:
        may: list[Callable[[], None]] = []
        for rank in self.scripts:
            if rank not in self.blocked or self.blocked[rank]():
                may.append(partial(self._step, rank))
            if self.to_rank[rank]:
                may.append(self.ranks[rank].receive)
        may += [partial(self._hear, r) for r, events in self.to_core.items() if events]
        may += [
            partial(each.has.add, rank)
            for each in self.sums.values()
            if each.is_sent
            for rank in each.members - each.has - each.lost
            if rank in self.scripts
        ]
        return may

    def _step(self, rank: int) -> None:
        self.blocked.pop(rank, None)
        try:
            self.blocked[rank] = next(self.scripts[rank])
        except StopIteration:
            del self.scripts[rank]

    def _hear(self, rank: int) -> None:
        self._deliver(self.core.handle(self.to_core[rank].popleft(), self.now_s))
        self.core.check()
        assert self.core.aborted is None

    def _kill(self, rank: int) -> None:
        """What it has sent last may be lost, as may sums on their way from it."""
        if rank not in self.scripts:
            return  # it has ended
        del self.scripts[rank]
        self.seen["died"] += 1
        events = self.to_core[rank]
        for _ in range(self.random.randint(0, len(events))):
            events.pop()
        events.append(RankLost(rank=rank))
        for each in self.sums.values():
            if rank in each.members:
                late = each.members - each.has
                each.lost |= {r for r in late if self.random.random() < 0.5}

    def check(self) -> None:
        """Each batch is in the survivors' model, or left for the next part, once."""
        survivors = [r for rank, r in self.ranks.items() if rank not in self.core.lost]
        assert len(survivors) == len(self.ranks) - len(self.core.lost)
        for rank in survivors:
            if rank.loop.end is not None:
                at = (range(a // SIZE, b // SIZE) for a, b in rank.loop.end.left)
                left = list(chain.from_iterable(at))
                self.seen["left"] += len(left)
                assert sorted([*rank.common, *left]) == list(range(BATCHES))


class Rank:
    """What a rank does.

    Attributes:
        common: batches in the common model that it holds.
        loop: decides.
    """

    def __init__(self, world: World, rank: int, overlapped: bool) -> None:
        self._world, self._rank = world, rank
        cost = RankTime(1)
        self.loop = WindowLoop(cost, overlapped=overlapped, reduced=-1)
        self.common: list[int] = []
        self._overlapped = overlapped
        self._inbox: deque[Instruction] = deque()
        self._leases: deque[int] = deque()
        self._drift: list[int] = []
        self._taken: list[int] = []
        self._sum: Sum | None = None
        self._last: Reduce | None = None
        self._generation = 0
        self._sizes = BatchSizes(())

    def receive(self) -> None:
        """The next message comes in."""
        self._inbox.append(self._world.to_rank[self._rank].popleft())

    def live(self) -> Script:
        """The epoch."""
        while True:
            while self._inbox:
                self._handle(self._inbox.popleft())
            in_flight = self.loop.in_flight is not None
            action = self.loop.next(
                self._world.now_s,
                has_work=bool(self._leases),
                is_reduced=in_flight and self._has_sum,
            )
            is_end = action.do is Do.REGROUP and self.loop.end is not None
            if action.do is Do.STOP or is_end:
                return
            yield from self._act(action)

    def _handle(self, told: Instruction) -> None:
        if isinstance(told, BeginEpoch):
            self._sizes = BatchSizes(told.sizes, BatchCut(*told.cut))
        elif isinstance(told, GrantBatches):
            self._leases.extend(range(told.start, told.stop))
        elif not isinstance(told, MetricsReported):
            if isinstance(told, Regroup):
                self._generation = told.generation
            if isinstance(told, Reduce):
                self._last = told
            if isinstance(told, CloseWindow) and told.drain:
                self._leases.clear()
            self.loop.handle(told, self._world.now_s)

    def _act(self, action: Action) -> Script:
        loop, now_s = self.loop, self._world.now_s
        if action.do is Do.TRAIN:
            batch = self._leases.popleft()
            yield lambda: True
            self._drift.append(batch)
            loop.trained(STEP_S)
            samples = self._sizes.samples_in(batch, batch + 1)
            done = batch_done(self._rank, batch, window=loop.window, samples=samples)
            self._send(done)
        elif action.do is Do.WAIT:
            if action.timeout_s is None:
                yield lambda: bool(self._inbox)
            else:
                self._world.now_s += action.timeout_s / len(self._world.ranks)
                yield lambda: True
        elif action.do is Do.CLOSE:
            self._taken, self._drift = self._drift, []
            self._send(closed(self._rank, loop.window))
            self._sum = None
            if loop.begins_at_close:
                self._begin(loop.window)
            loop.closed(now_s)
        elif action.do is Do.BEGIN:
            assert isinstance(action.instruction, Reduce)
            self._begin(action.instruction.window)
            loop.begun()
        elif action.do in (Do.REDUCE, Do.FINISH):
            assert isinstance(action.instruction, Reduce)
            self._begin(action.instruction.window)
            yield lambda: self._has_sum or self._is_told
            if self._has_sum:
                self._adopt(action.instruction.window)
        elif action.do is Do.ADOPT:
            assert action.instruction is not None
            window = action.instruction.window  # type: ignore[union-attr]
            assert loop.reduced_window >= window
            moved_on = loop.window > window + 1
            self._world.seen["had moved on"] += moved_on
            loop.reduced(now_s)
            self._send(reduced(self._rank, window))
        else:
            yield from self._regroup()

    def _begin(self, window: int) -> None:
        if self._sum is None:
            key, members = (self._generation, window), self._world.groups
            new = Sum(members[self._generation])
            self._sum = self._world.sums.setdefault(key, new)
            self._sum.parts[self._rank] = self._taken

    @property
    def _has_sum(self) -> bool:
        return self._sum is not None and self._rank in self._sum.has

    @property
    def _is_told(self) -> bool:
        return any(isinstance(each, Regroup) for each in self._inbox)

    def _adopt(self, window: int) -> None:
        assert self._sum is not None
        self.common = self.common + self._sum.batches
        self.loop.reduced(self._world.now_s)
        self._sum = None
        self._send(reduced(self._rank, window))

    def _regroup(self) -> Script:
        world, last = self._world, self._last
        yield lambda: True
        lacks = last is not None and self.loop.reduced_window < last.window
        if last is not None and lacks and self._has_sum:
            world.seen["had the sum"] += 1
            self._adopt(last.window)
            lacks = False
        generation = self._generation
        forming = world.forming.setdefault(generation, Forming())
        forming.offers[self._rank] = lacks, last is not None and not lacks
        forming.models[self._rank] = self.common
        members = world.groups[generation]
        yield lambda: forming.offers.keys() >= members or self._is_told
        if self._is_told:
            return
        holders = [rank for rank in sorted(members) if forming.offers[rank][1]]
        if lacks and holders:
            world.seen["handed over"] += 1
            self.common = forming.models[holders[0]]
            self.loop.reduced(world.now_s)
        yield lambda: True
        if self._is_told:
            world.seen["died in the new group"] += 1
            return
        self._sum = None
        self.loop.regrouped()
        self._send(
            Regrouped(
                rank=self._rank,
                generation=generation,
                epoch=0,
                reduced=self.loop.reduced_window,
            )
        )

    def _send(self, event: Any) -> None:
        if isinstance(event, WindowReduced) and self._world.core.lost:
            self._world.seen["after a death"] += 1
        self._world.to_core[self._rank].append(event)


@pytest.mark.parametrize(
    "seeds",
    [range(100), pytest.param(range(100, 1000), marks=pytest.mark.slow)],
    ids=["quick", "many"],
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_death_in_any_order_is_settled(policy: str, ranks: int, seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = World(policy, ranks, seed)
        try:
            world.run()
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(world.seen)
    expected = {"died", "after a death", "left"}
    if ranks > 2:
        expected |= {"handed over", "had moved on"}
    if len(seeds) > 100:
        expected |= {"had the sum"} | (
            {"died in the new group"} if ranks > 2 else set()
        )
    assert expected <= seen.keys(), seen
