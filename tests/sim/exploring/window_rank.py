"""One rank's process under ``cadence`` or ``async``, as a script without effects.

What `elche.runtime.epochs.window_epoch`, `elche.runtime.epochs.epoch_opening` and
`elche.runtime.windows.regrouping` do with sockets and collectives, with the decisions
of the same `WindowLoop`; a model is the positions that went into it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable
from itertools import chain
from typing import Any

from elche.cadence.rank_time import RankTime
from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.accounts.epoch_parts import PartRanges
from elche.coordination.protocol.events import (
    EpochOpened,
    JoinReady,
    Left,
    ModelUpdated,
    Regrouped,
    WindowClosed,
)
from elche.coordination.protocol.instructions import (
    Abort,
    Adopt,
    BeginEpoch,
    CloseWindow,
    GrantBatches,
    Instruction,
    Reduce,
    Regroup,
    Welcome,
)
from elche.coordination.windows.lease_reports import LeaseReports
from elche.coordination.windows.window_loop import Action, Do, WindowLoop
from elche.sim.rank import LEFT_BEHIND, join_of
from tests.harness.model_checks import checks_of
from tests.sim.exploring.rank_states import Seat

BATCH_S = 0.25
Run = Generator[None, None, Any]
Positions = tuple[int, ...]


class LostError(Exception):
    """A rank that this one waits for has died, as it reads."""


class WindowRank:
    """A rank, from its join to its end.

    Attributes:
        common: positions in the common model that it holds.
        reduced: the last window whose result that has.
        is_new: it holds no model yet.
    """

    def __init__(self, seat: Seat, rank: int, founders: int) -> None:
        self._seat, self._rank = seat, rank
        self._members = list(range(founders))
        self._part = PartRanges(((0, seat.sizes.num_samples),))
        self._is_due = self._opens = False
        self._cost = RankTime(1)
        self.generation, self.reduced = 0, -1
        self.common: Positions = ()
        self.is_new = self._is_part = rank >= founders

    def live(self) -> Run:
        """One of those that the run begins with."""
        answer = yield from self._ask()
        assert isinstance(answer, Welcome), answer
        yield from self._epoch()

    def join(self) -> Run:
        """A newcomer, which may be turned away."""
        answer = yield from self._ask()
        if isinstance(answer, Abort):
            return
        self._seat.tell(JoinReady(rank=self._rank))
        yield from self._word()
        if isinstance(self._seat.inbox[0], Abort):
            return
        yield from self._regroup_between()
        yield from self._epoch()

    def _ask(self) -> Run:
        cluster = self._seat.cluster
        self._seat.tell(join_of(cluster, self._rank, cluster.devices[0]))
        yield from self._word()
        return self._seat.inbox.popleft()

    def _word(self) -> Run:
        while not self._seat.inbox:
            yield

    def _epoch(self) -> Run:
        while self._part.num_positions:
            begin = yield from self._open()
            end = yield from self._train(begin)
            self.reduced, self._loop = self._loop.reduced_window, None
            self._part, self._is_part = self._part.origins_of(end.left), True
        self._seat.tell(Left(rank=self._rank))

    def _open(self) -> Run:
        """Opens the epoch, or what is left of it, with all; forms groups meanwhile."""
        self._opens = True
        self._say_opened()
        while True:
            if self._is_due:
                yield from self._regroup_between()
            yield from self._word()
            told = self._seat.inbox.popleft()
            if isinstance(told, BeginEpoch):
                self._opens = False
                return told
            if isinstance(told, Regroup):
                self._hear(told)
            else:
                assert isinstance(told, LEFT_BEHIND), told

    def _say_opened(self) -> None:
        """The first rank says the sizes."""
        if self._opens:
            is_first = self._rank == min(self._members)
            sizes = self._part.sizes_in(self._seat.sizes).runs
            told = EpochOpened(
                rank=self._rank,
                epoch=0,
                sizes=sizes if is_first else None,
                checks=checks_of(self.common),
                continues=self._is_part,
            )
            self._seat.tell(told)

    def _train(self, begin: BeginEpoch) -> Run:
        """The epoch, or a part of it, to its end."""
        self._sizes = BatchSizes(begin.sizes, BatchCut(*begin.cut))
        is_overlapped, held = begin.policy == "async", begin.window - 1
        loop = WindowLoop(self._cost, overlapped=is_overlapped, reduced=held)
        self._loop: Any = loop
        self._reports = LeaseReports(self._rank, 0)
        self._leases = deque[int]()
        self._drift: Positions = ()
        self._offered: Positions = ()
        self._sum: tuple[Any, ...] | None = None
        self._last: Reduce | None = None
        while True:
            while self._seat.inbox:
                self._handle(self._seat.inbox.popleft())
            is_reduced = loop.in_flight is not None and self._has_sum
            has_work = bool(self._leases)
            action = loop.next(0.0, has_work=has_work, is_reduced=is_reduced)
            is_stop = action.do is Do.REGROUP and loop.end is not None
            if action.do is Do.STOP or is_stop:
                assert not self._drift, f"{self._drift} are in no model"
                return loop.end
            yield from self._act(action)

    def _handle(self, told: Instruction) -> None:
        assert not isinstance(told, Abort), told
        if isinstance(told, GrantBatches):
            self._reports.granted(told)
            self._leases.extend(range(told.start, told.stop))
            return
        if isinstance(told, CloseWindow) and told.drain:
            self._report()
            self._leases.clear()
            self._reports.void()
        if isinstance(told, Regroup):
            self._hear(told)
        if isinstance(told, Reduce):
            self._last = told
        self._loop.handle(told, 0.0)

    def _report(self) -> None:
        if (done := self._reports.take(self._loop.window)) is not None:
            self._seat.tell(done)

    def _act(self, action: Action) -> Run:
        told = action.instruction
        if action.do is Do.TRAIN:
            yield from self._train_on(self._leases.popleft())
        elif action.do is Do.WAIT:
            yield
        elif action.do is Do.CLOSE:
            self._close()
            yield
        elif action.do is Do.BEGIN:
            assert isinstance(told, Reduce)
            self._offer(told.window)
            self._loop.begun()
            yield
        elif action.do in (Do.REDUCE, Do.FINISH):
            assert isinstance(told, Reduce)
            self._offer(told.window)
            yield from self._reduce(told.window)
        elif action.do is Do.ADOPT:
            assert isinstance(told, Adopt)
            held = self._loop.reduced_window
            assert held >= told.window, f"adopts {told.window}, holds {held}"
            self._say_reduced(told.window)
        else:
            yield from self._regroup()

    def _train_on(self, batch: int) -> Run:
        yield
        sizes, loop = self._sizes, self._loop
        at = range(sizes.position_of(batch), sizes.position_of(batch + 1))
        parts = [self._part.origins_of([(p, p + 1)]).ranges for p in at]
        self._drift += tuple(first for ((first, _),) in parts)
        loop.trained(BATCH_S)
        cost = BatchCost(samples=len(at), busy_s=BATCH_S, data_wait_s=0.0)
        if self._reports.batch_done(batch, cost) or loop.is_throttled:
            self._report()

    def _close(self) -> None:
        loop = self._loop
        self._report()
        self._offered, self._drift, self._sum = self._drift, (), None
        closed = WindowClosed(
            rank=self._rank, epoch=0, window=loop.window, changed_buffers=()
        )
        self._seat.tell(closed)
        if loop.begins_at_close:
            self._offer(loop.window)
        loop.closed(0.0)

    def _offer(self, window: int) -> None:
        """Takes part in a reduction, unless it does already."""
        if self._sum is None:
            self._sum = "sum", self.generation, window
            self._summing = frozenset(self._members)
            self._seat.met.setdefault(self._sum, {})[self._rank] = self._offered

    @property
    def _has_sum(self) -> bool:
        sent = self._seat.met.get(self._sum, {})
        return self._sum is not None and sent.keys() >= self._summing

    @property
    def _is_told(self) -> bool:
        return any(isinstance(one, Regroup) for one in self._seat.inbox)

    def _reduce(self, window: int) -> Run:
        """Waits for the sum; a death breaks that off, but not in shared memory."""
        while not self._has_sum or (self._is_told and not self._seat.keeps):
            if self._is_told:
                return
            yield
        self._adopt()
        self._say_reduced(window)
        yield

    def _adopt(self) -> None:
        """The sum is in the model; who has died since has its part in it."""
        parts = self._seat.met[self._sum]
        self._hold(chain(self.common, *parts.values()))

    def _hold(self, positions: Iterable[int]) -> None:
        common = Counter(positions)
        twice = [position for position, count in common.items() if count > 1]
        assert not twice, f"positions {twice} are twice in a model"
        lost = set(self._offered) - common.keys()
        assert not lost, f"positions {lost} of rank {self._rank} are lost"
        self.common, self._offered, self._sum = tuple(sorted(common)), (), None

    def _say_reduced(self, window: int) -> None:
        self._loop.reduced(0.0)
        self.reduced = self._loop.reduced_window
        said = dict(sync_s=0.0, wait_s=0.0, divergence=0.0, adopted_at=0)
        told = ModelUpdated(rank=self._rank, epoch=0, window=window, **said)
        self._seat.tell(told)

    def _hear(self, told: Regroup) -> None:
        self.generation, self._is_due = told.generation, True
        stay = () if self._rank in told.joined else self._members
        self._members = sorted({*stay, *told.joined} - {*told.left})

    def _regroup(self) -> Run:
        """Forms the next group in an epoch, and settles what was open."""
        self._report()
        loop, last = self._loop, self._last
        lacks = last is not None and loop.reduced_window < last.window
        if last is not None and lacks and self._seat.keeps and self._has_sum:
            self._adopt()
            self._say_reduced(last.window)
            lacks = False
        try:
            yield from self._form(lacks=lacks, holds=last is not None and not lacks)
        except LostError:
            return
        self._sum = None
        loop.regrouped()
        self._say_regrouped(loop.reduced_window)

    def _regroup_between(self) -> Run:
        """Forms it where the rank waits for an epoch, until nobody dies in that."""
        self._is_due = True
        while self._is_due:
            while self._is_told:
                told = next(o for o in self._seat.inbox if isinstance(o, Regroup))
                self._seat.inbox.remove(told)
                self._hear(told)
            try:
                yield from self._form(lacks=False, holds=False)
            except LostError:
                continue
        self._say_opened()
        self._say_regrouped(-1)

    def _say_regrouped(self, reduced: int) -> None:
        told = Regrouped(
            rank=self._rank, generation=self.generation, epoch=0, reduced=reduced
        )
        self._seat.tell(told)

    def _form(self, *, lacks: bool, holds: bool) -> Run:
        """As `Regrouping.settle`: who lacks the state or a result takes it."""
        mine = None if self.is_new else (self.common, self._part)
        states = yield from self._meet("state", mine)
        if self.is_new:
            source = next(rank for rank in self._members if states[rank] is not None)
            (self.common, self._part), self.is_new = states[source], False
        said = yield from self._meet("results", (lacks, holds))
        holders = [rank for rank in self._members if said[rank][1]]
        if holders and any(said[rank][0] for rank in self._members):
            is_source = self._rank == holders[0]
            models = yield from self._meet("model", self.common if is_source else None)
            if lacks:
                self._hold(models[holders[0]])
                self._loop.reduced(0.0)
                self.reduced = self._loop.reduced_window
        self._is_due = False

    def _meet(self, what: str, mine: Any) -> Run:
        """Something of all members.

        Raises:
            LostError: one of them has died.
        """
        there = self._seat.met.setdefault(("form", self.generation, what), {})
        there[self._rank] = mine
        while True:
            yield
            if self._is_told:
                raise LostError
            if there.keys() >= set(self._members):
                return dict(there)
