"""Ranks of ``sync`` that die and join at any moment, for tests of all interleavings.

Ranks are scripts that keep to the protocol as the shell does, with the decisions of
`elche.coordination.sync.lost_ranks` and the real core, under every interleaving that is
drawn. What a rank has sent outlives it, as shared memory does; over gloo it does not,
and sums are handed over by who has them.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Generator
from dataclasses import replace
from itertools import chain, starmap
from typing import Any, NamedTuple

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.accounts.epoch_parts import EpochRest, PartRanges
from elche.coordination.agreement import Settings
from elche.coordination.protocol.events import (
    EpochOpened,
    Join,
    JoinReady,
    Left,
    ModelUpdated,
    RankLost,
    Regrouped,
)
from elche.coordination.protocol.instructions import (
    Abort,
    BeginEpoch,
    EndEpoch,
    GrantBatches,
    Instruction,
    Regroup,
    Welcome,
)
from elche.coordination.protocol.messages import PROTOCOL_VERSION, CheckRows
from elche.coordination.state import Coordinator
from elche.coordination.sync.lost_ranks import LostRanks, StepPlace, settle
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.coordination.sync.step_reports import EARLY, StepReports
from tests.harness.model_checks import checks_of
from tests.harness.reached import reach

BUCKETS = 2
MOST_MOVES = 20_000

Script = Generator[None, None, Any]
Positions = tuple[int, ...]


class LostError(Exception):
    """Another rank has died, and this one waits for it."""


def summed(parts: dict[int, Positions]) -> Positions:
    """Of all ranks."""
    return tuple(sorted(chain.from_iterable(parts.values())))


class TooEarlyError(Exception):
    """No run outlives a death here."""


class World:
    """Ranks, their core, and what they have sent each other."""

    def __init__(
        self,
        sizes: BatchSizes,
        ranks: int,
        *,
        keeps: bool,
        kills_source: bool = False,
        joins: tuple[int, ...] = (),
        early: bool = False,
    ) -> None:
        self.early, self.refused = early, False
        self.sizes, self.keeps, self.kills_source = sizes, keeps, kills_source
        self.founders, self.joins = ranks, joins
        self.deaths: dict[int, int] = {}
        self.core = Coordinator(ranks, survives=True)
        self.inboxes: dict[int, deque[Instruction]] = {r: deque() for r in range(ranks)}
        self.met: dict[Any, dict[int, Any]] = {}
        self.ranks = [Rank(self, rank, ranks) for rank in range(ranks)]
        self.scripts = {rank.rank: rank.live() for rank in self.ranks}
        self.moves = Counter[int]()
        self.killed: set[int] = set()

    def tell(self, event: Any) -> None:
        """An event, and what the core answers."""
        for one in self.core.handle(event, 0.0):
            if one.rank in self.inboxes:
                self.inboxes[one.rank].append(one)
        self.core.check()

    def kill(self, rank: int) -> None:
        """It has sent what it has sent."""
        self.killed.add(rank)
        del self.scripts[rank], self.inboxes[rank]
        self.tell(RankLost(rank=rank))

    def come(self) -> None:
        """Another rank asks to join."""
        rank = Rank(self, len(self.ranks), self.founders)
        self.ranks.append(rank)
        self.inboxes[rank.rank] = deque()
        self.scripts[rank.rank] = rank.join()

    def run(self, draws: random.Random, deaths: dict[int, int]) -> None:
        """To the end; each of some ranks dies after so many moves of its own."""
        self.deaths = deaths
        for number in range(MOST_MOVES):
            if not self.scripts or self.core.aborted or self.refused:
                return
            for _ in range(self.joins.count(number)):
                self.come()
            rank = draws.choice(sorted(self.scripts))
            if self.moves[rank] == deaths.get(rank):
                self.kill(rank)
                continue
            self.moves[rank] += 1
            try:
                next(self.scripts[rank])
            except StopIteration:
                del self.scripts[rank]
            except TooEarlyError:
                self.refused = True
        raise AssertionError(f"hangs: {self.core.doing}; {self.core.story()[-9:]}")


class Open(NamedTuple):
    """A step whose backward pass has not come; its positions, its part of the epoch."""

    step: int
    own: Positions
    span: int


class Rank:
    """One rank's process."""

    def __init__(self, world: World, rank: int, ranks: int) -> None:
        self.world, self.rank = world, rank
        self.members = list(range(ranks))
        self.generation = 0
        self.lost = LostRanks()
        self.model: list[Positions] = []
        self.closed = self.steps = 0
        self.last_sums: dict[int, Positions] = {}
        self.step = self.passed = -1
        self.is_inside = False
        self.open: Open | None = None
        self.span = 0
        self.at_begin: list[int] = []
        self.grants: dict[int, GrantBatches] = {}
        self.end: EndEpoch | None = None
        self.rest = EpochRest.whole(world.sizes)
        self.is_new = self.is_apart = self.is_part = rank >= ranks
        self.opened: EpochOpened | None = None

    @property
    def place(self) -> StepPlace:
        waits = self.open is not None and self.open.span == self.span
        return StepPlace.at(
            self.closed,
            self.step,
            is_inside=self.is_inside,
            waits=self.open.step if self.open is not None and waits else None,
            passed=self.passed,
        )

    @property
    def inbox(self) -> deque[Instruction]:
        return self.world.inboxes[self.rank]

    def ask(self) -> Script:
        """Asks to be in the run; returns the answer."""
        settled = Settings(config=RunConfig(leave_out=False))
        self.world.tell(
            Join(
                rank=self.rank,
                version=PROTOCOL_VERSION,
                world_size=self.world.founders,
                settings=settled.as_pairs(),
                tensors=(),
                device="CPU",
                horizon_batches=1,
            )
        )
        while not self.inbox:
            yield
        return self.inbox.popleft()

    def live(self) -> Script:
        """A founder."""
        answer = yield from self.ask()
        assert isinstance(answer, Welcome)
        yield from self.go_on()

    def join(self) -> Script:
        """A newcomer; ends where it is turned away."""
        answer = yield from self.ask()
        if isinstance(answer, Abort):
            return
        yield
        self.world.tell(JoinReady(rank=self.rank))
        while not self.inbox:
            yield
        if isinstance(self.inbox[0], Abort):
            return
        yield from self.regroup(is_between=True)
        yield from self.go_on()

    def go_on(self) -> Script:
        """The rest of the epoch."""
        world = self.world
        while self.rest.left.num_positions:
            sizes = self.rest.part_sizes
            yield from self.begin(sizes)
            yield from self.train(self.rest.left, sizes)
            assert self.end is not None
            self.rest, self.is_part = self.rest.after(self.end), True
        self.span += 1  # the epoch is over, and what is open of it
        yield from self.backward()
        world.tell(Left(rank=self.rank))

    def begin(self, sizes: BatchSizes) -> Script:
        """Opens the epoch, or its next part, with all."""
        self.opened = EpochOpened(
            rank=self.rank,
            epoch=0,
            sizes=sizes.runs,
            checks=checks_of(self.model),
            continues=self.is_part,
        )
        self.step, self.passed, self.is_inside = -1, -1, False
        self.span += 1
        self.say_opened()
        while True:
            yield
            if not self.inbox:
                continue
            one = self.inbox.popleft()
            if isinstance(one, BeginEpoch):
                break
            if isinstance(one, Regroup):
                self.hear(one)
                yield from self.regroup(is_between=True)
        self.opened = None
        self.at_begin = list(self.members)
        self.lost.begin_part()
        self.grants, self.end, self.has_said = {}, None, False
        self.reports = StepReports(self.rank, 0, NonFiniteRecord())
        self.ran: deque[int] = deque()
        self.checks: dict[int, CheckRows] = {}
        self.said_until, self.is_known = 0, False

    def say_opened(self) -> None:
        """The first rank of those that live says the sizes."""
        if self.opened is not None:
            is_first = self.rank == min(self.members)
            said = self.opened if is_first else replace(self.opened, sizes=None)
            self.world.tell(said)

    def train(self, part: PartRanges, sizes: BatchSizes) -> Script:
        """Steps to the end of the part."""
        for step in range(sizes.num_batches):
            while step not in self.grants and not self.is_over(step):
                if not self.is_known:
                    self.account(sizes.num_batches)
                yield from self.look()
            if self.is_over(step):
                break
            self.steps += 1
            self.step, self.is_inside = step, True
            if self.world.early:
                yield from self.backward()  # of the step before
            self.open = Open(step, self.part_of(step, part, sizes), self.span)
            yield  # in the forward pass
            if not self.world.early:
                yield from self.backward()
            yield  # in the optimizer
            self.is_inside = False
            self.ran.append(step)
            self.checks[step + 1] = checks_of(self.model, at=step + 1)
            self.account(self.place.first)
        self.account(sizes.num_batches)
        while self.end is None:
            yield from self.look()
            if self.lost.is_settled and not self.has_said:
                self.has_said, last = True, self.lost.last
                said = dict(sync_s=0.0, wait_s=0.0, divergence=0.0, adopted_at=0)
                told = ModelUpdated(rank=self.rank, epoch=0, window=last, **said)
                self.world.tell(told)

    def is_over(self, step: int) -> bool:
        return self.end is not None or step > self.lost.last

    def account(self, until: int) -> None:
        """Reports steps of which nothing is missing."""
        while self.ran and self.ran[0] < until:
            step = self.ran.popleft()
            grant = self.grants[step]
            share = grant.shares[self.rank]
            cost = BatchCost(samples=share, busy_s=0.01 * share, data_wait_s=0.0)
            if not self.lost.is_settled and self.reports.step_done(step, cost):
                checks = self.checks.pop(grant.start, ())
                self.said_until, is_early = step + 1, self.open is not None
                self.is_known |= is_early
                unknown = EARLY if is_early else ""
                self.reports.close(
                    backward_passes=self.closed, unknown=unknown, checks=checks
                )
            self.report()

    def report(self) -> None:
        if (said := self.reports.take()) is not None:
            self.world.tell(said)

    def look(self) -> Script:
        """Reads one message."""
        yield
        if not self.inbox:
            return
        one = self.inbox.popleft()
        if isinstance(one, GrantBatches):
            if not self.lost.is_settled:
                self.reports.granted(one)
            self.grants |= dict.fromkeys(range(one.start, one.stop), one)
        elif isinstance(one, EndEpoch):
            self.end = one
        elif isinstance(one, Regroup):
            self.hear(one)
            yield from self.regroup()

    def backward(self) -> Script:
        """Sends and sums buckets; anew if a rank dies meanwhile."""
        if self.open is None:
            return
        number, own = self.closed, self.open.own
        while self.closed == number:
            key = "sum", self.generation, number
            sums = {}
            try:
                for bucket in range(BUCKETS):
                    self.world.met.setdefault((*key, bucket), {})[self.rank] = own
                    yield
                for bucket in range(BUCKETS):
                    got = yield from self.meet((*key, bucket), own)
                    sums[bucket] = summed(got)
                self.take(sums)
                return
            except LostError:
                self.open_pass = key
            yield from self.regroup()

    def part_of(self, step: int, part: PartRanges, sizes: BatchSizes) -> Positions:
        shares = self.grants[step].shares
        start = sizes.position_of(step) + sum(shares[: self.rank])
        at = range(start, start + shares[self.rank])
        origins = [*chain.from_iterable(starmap(range, part.ranges))]
        return tuple(origins[position] for position in at)

    def take(self, sums: dict[int, Positions]) -> None:
        """A pass is closed: for all its buckets."""
        assert len(sums) == BUCKETS
        assert len(set(sums.values())) == 1, sums
        self.last_sums = sums
        self.model.append(sums[0])
        self.closed += 1
        assert self.open is not None
        self.passed = self.open.step if self.open.span == self.span else -1
        self.open = None

    def meet(self, key: Any, mine: Any) -> Generator[None, None, dict[int, Any]]:
        """Something of all members.

        Raises:
            LostError: one of them has died, as this rank reads.
        """
        there = self.world.met.setdefault(key, {})
        there[self.rank] = mine
        while not there.keys() >= set(self.members):
            yield
            if any(isinstance(one, Regroup) for one in self.inbox):
                if there.keys() >= set(self.members) and self.world.keeps:
                    break
                raise LostError
        return dict(there)

    def hear(self, *heard: Regroup) -> None:
        in_line = [one for one in self.inbox if isinstance(one, Regroup)]
        for one in (*heard, *in_line):
            self.generation = one.generation
            stay = () if self.rank in one.joined else self.members
            self.members = sorted({*stay, *one.joined} - {*one.left})
        for one in in_line:
            self.inbox.remove(one)

    def regroup(self, *, is_between: bool = False) -> Script:
        """As `StepGroups.settle`, until nobody dies in it."""
        if self.open is not None and self.open.span != self.span:
            raise TooEarlyError
        if not is_between:
            self.report()
            self.reports.void()
            self.ran.clear()
        while True:
            self.hear()
            try:
                yield from self.form()
                break
            except LostError:
                continue
        firsts = () if is_between else self.lost.first.values()
        if any(first < self.said_until for first in firsts):
            raise TooEarlyError
        self.say_opened()
        is_settled = self.lost.is_settled and not is_between
        self.has_said = False
        self.world.tell(
            Regrouped(
                rank=self.rank,
                generation=self.generation,
                epoch=0,
                reduced=self.lost.last if is_settled else -1,
                lost=() if is_between else self.lost.to_wire(),
            )
        )

    def take_over(self) -> Script:
        """The state of the first rank that has it; newcomers lack it."""
        held = self.model, self.steps, self.rest
        mine = None if self.is_new else held
        states = yield from self.meet(("form", self.generation, "state"), mine)
        if self.is_new:
            source = next(rank for rank in self.members if states[rank] is not None)
            model, *others = states[source]
            self.model, (self.steps, self.rest) = [*model], others
            self.is_new = False

    def form(self) -> Script:
        key = "form", self.generation
        yield from self.take_over()
        said = yield from self.meet((*key, "places"), (self.place, self.is_apart))
        self.is_apart = any(said[rank][1] for rank in self.members)
        if self.is_apart:
            reach("built with a newcomer", 1)
            yield from self.meet((*key, "built"), None)
            self.closed, self.is_apart = 0, False
            self.step = self.passed = -1
            return
        found = settle([said[rank][0] for rank in self.members])
        is_source = found.source is not None and self.members[found.source] == self.rank
        if is_source and self.world.kills_source and self.rank:
            reach("its source has died", 1)
            self.world.deaths[self.rank] = self.world.moves[self.rank]
            yield
        self.lost.take(set(self.at_begin or self.members) - set(self.members), found)
        if found.source is not None:
            reach("sums taken over", 1)
            source = self.members[found.source]
            sums = self.last_sums if self.rank == source else None
            got = yield from self.meet((*key, "sums"), sums)
            if self.place.passes < found.passes:
                sums = got[source]
                assert sums is not None
                if self.world.keeps:  # the same as what lies in shared memory
                    sent = [
                        self.world.met[(*self.open_pass, b)] for b in range(BUCKETS)
                    ]
                    for bucket, each in enumerate(sent):
                        assert summed(each) == sums[bucket]
                self.take(sums)
        else:
            reach("a pass reduced anew, or none open", 1)
        yield from self.meet((*key, "buckets"), None)
        self.lost.confirm()


def check(world: World) -> None:
    """Each position is once in every survivor's model, in as many steps."""
    assert not world.core.aborted, world.core.aborted
    assert world.core.lost <= world.killed  # it may have been about to leave
    survivors = [
        rank
        for rank in world.ranks
        if rank.rank not in world.killed
        and (rank.rank < world.founders or rank.at_begin)
    ]
    assert len({tuple(rank.model) for rank in survivors}) == 1
    model = survivors[0].model
    positions = sorted(chain.from_iterable(model))
    assert positions == [*range(world.sizes.num_samples)]
    assert {rank.steps for rank in survivors} == {len(model)}
    steps, last = world.sizes.num_batches, world.core.lost
    assert steps <= len(model) <= steps + len(last)  # more if it died in the last step
