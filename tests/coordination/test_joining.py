"""A rank joins a run where its epoch is cut, whatever comes between. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.protocol.events import (
    EpochOpened,
    Event,
    Failed,
    JoinReady,
    Left,
    RankLost,
    Regrouped,
    Tick,
    WindowClosed,
)
from elche.coordination.protocol.instructions import (
    Abort,
    BeginEpoch,
    CloseWindow,
    EndEpoch,
    GrantBatches,
    Instruction,
    OpenWindow,
    Reduce,
    Regroup,
    Welcome,
)
from elche.coordination.state import Coordinator
from elche.sim.cluster import Cluster
from elche.sim.rank import join_of
from tests.coordination.test_core import batch_done, closed, reduced, with_run
from tests.coordination.test_core import plan_of as founded
from tests.harness.model_checks import checks_of

BATCHES, FOUNDERS = 24, 2


def plan_of(
    policy: str = "cadence", founders: int = FOUNDERS, **options: Any
) -> Cluster:
    plan = with_run(founded(policy, founders, **options), batch_sizes=((8, BATCHES),))
    return replace(plan, devices=(replace(plan.devices[0], name="CPU"),))


class Member:
    """A rank as the core sees it: does at once what it is told, one thing at a time.

    It trains a batch when it is asked to move; what the core says it does before.
    """

    def __init__(self, rank: int, *, joins: bool = False) -> None:
        self.rank = rank
        self.joins = joins
        self.is_over = self.is_in = False
        self.refused, self.checks = "", checks_of("common")
        self.leases: list[int] = []
        self.window = self.trained = self.reduced = 0
        self.opened: EpochOpened | None = None
        self.batches: list[tuple[int, int]] = []
        self.starts = 0

    def hear(self, told: Instruction) -> list[Event]:
        """What it answers."""
        rank = self.rank
        if isinstance(told, Abort):
            self.refused = told.reason
            return [RankLost(rank=rank)]
        if isinstance(told, Welcome) and not self.joins:
            return self.open(0, continues=False, sizes=((8, BATCHES),))
        if isinstance(told, Regroup):
            self.is_in = True
            again = [self.opened] if self.opened is not None else []
            if self.joins and not self.starts:
                again = self.open(0, continues=True, sizes=())
            word = Regrouped(
                rank=rank, generation=told.generation, epoch=0, reduced=self.reduced
            )
            return [*again, word]
        if isinstance(told, BeginEpoch):
            self.opened, self.starts = None, self.starts + 1
            self.window, self.trained, self.leases = told.window, 0, []
            self.reduced = told.window - 1
        if isinstance(told, OpenWindow):
            self.window, self.trained = told.window, 0
        if isinstance(told, GrantBatches):
            self.leases += range(told.start, told.stop)
        if isinstance(told, CloseWindow):
            if told.drain:
                self.leases = []
            return [self.close()]
        if isinstance(told, Reduce):
            self.reduced = told.window
            return [reduced(rank, told.window)]
        if isinstance(told, EndEpoch):
            if told.left and not told.is_early:
                samples = sum(stop - start for start, stop in told.left)
                return self.open(0, continues=True, sizes=((8, samples // 8),))
            self.is_over = True
            return [Left(rank=rank)]
        return []

    def open(
        self, epoch: int, *, continues: bool, sizes: tuple[tuple[int, int], ...]
    ) -> list[Event]:
        said = sizes if self.rank == 0 else None
        self.opened = EpochOpened(
            rank=self.rank,
            epoch=epoch,
            sizes=said,
            continues=continues,
            checks=self.checks,
        )
        return [self.opened]

    def close(self) -> WindowClosed:
        return closed(self.rank, self.window)

    def move(self) -> list[Event]:
        """Trains a batch, if it may."""
        if not self.leases or self.opened is not None:
            return []
        batch = self.leases.pop(0)
        self.trained += 1
        self.batches.append((self.starts, batch))
        return [batch_done(self.rank, batch, window=self.window)]


class Meeting:
    """The core, its members, and a rank that joins."""

    kind: type[Member] = Member

    def __init__(self, plan: Cluster, core: Coordinator | None = None) -> None:
        self.plan = plan
        founders = plan.devices[0].count
        self.core = core or Coordinator(founders, survives=True)
        self.members = {rank: self.kind(rank) for rank in range(founders)}
        self.now_s = 0.0
        self.told: dict[int, list[Instruction]] = defaultdict(list)
        for rank in range(founders):
            self.say(join_of(plan, rank, plan.devices[0]))

    def say(self, *events: Event) -> None:
        """Events come, and everybody answers what the core says of them."""
        waiting = list(events)
        while waiting:
            self.now_s += 0.01
            event = waiting.pop(0)
            for told in self.core.handle(event, self.now_s):
                self.told[told.rank].append(told)
                member = self.members.get(told.rank)
                if member is not None:
                    waiting += member.hear(told)
            self.core.check()

    def come(self, rank: int = FOUNDERS, **changes: object) -> None:
        """Another rank asks to join."""
        self.members[rank] = self.kind(rank, joins=True)
        join = join_of(self.plan, rank, self.plan.devices[0])
        self.say(replace(join, **changes))  # type: ignore[arg-type]

    def move(self, rank: int) -> None:
        """A member trains a batch."""
        if rank in self.members:
            self.say(*self.members[rank].move())

    def lose(self, rank: int) -> None:
        """A rank dies."""
        member = self.members.pop(rank, None)
        if member is not None and not member.is_over:
            self.say(RankLost(rank=rank))

    def finish(self) -> None:
        """All train until the epoch is over."""
        for _ in range(50 * BATCHES):
            for rank in list(self.members):
                self.move(rank)
            if self.core.is_finished or self.core.aborted:
                return
        raise AssertionError(self.core.doing)


def test_a_rank_is_welcomed_at_once_and_taken_in_where_the_epoch_is_cut() -> None:
    meeting = Meeting(plan_of())
    meeting.move(0)
    meeting.come()
    assert [type(told) for told in meeting.told[2]] == [Welcome]
    assert not any(isinstance(told, Regroup) for told in meeting.told[0])
    meeting.say(JoinReady(rank=2))
    meeting.finish()
    assert meeting.core.aborted is None
    assert meeting.members[2].batches, "it trained"
    regroups = [told for told in meeting.told[2] if isinstance(told, Regroup)]
    assert [told.joined for told in regroups] == [(0, 1, 2)]
    regroups = [told for told in meeting.told[0] if isinstance(told, Regroup)]
    assert [told.joined for told in regroups] == [(2,)]


@pytest.mark.parametrize(
    ("policy", "options", "changes", "says"),
    [
        ("cadence", {}, {"tensors": ()}, "the model differs"),
        ("cadence", {}, {"version": 1}, "uses protocol version 1"),
        ("cadence", {"survive": False}, {}, "no rank can join survive=False"),
    ],
)
def test_who_does_not_fit_is_refused_and_the_run_goes_on(
    policy: str, options: dict[str, object], changes: dict[str, object], says: str
) -> None:
    meeting = Meeting(plan_of(policy, **options))
    meeting.move(0)
    meeting.come(**changes)
    assert says in meeting.members[2].refused
    meeting.finish()
    assert meeting.core.aborted is None


def test_a_rank_of_another_kind_joins() -> None:
    """It compares no bits, and the others go on to do so among themselves."""
    meeting = Meeting(plan_of())
    meeting.move(0)
    meeting.come(device="NVIDIA A100")
    meeting.members[2].checks = ()
    meeting.say(JoinReady(rank=2))
    meeting.finish()
    assert meeting.core.aborted is None
    assert meeting.members[2].batches, "it trained"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"checks": checks_of("common"), "steps": 7}, "rank 2 asks for 7 steps more"),
        ({"checks": checks_of("mine")}, r"ranks [2] and [0, 1] hold different"),
    ],
)
def test_who_opens_another_epoch_ends_alone(
    other: dict[str, object], says: str
) -> None:
    meeting = Meeting(plan_of())
    meeting.come()
    joiner = meeting.members[2]
    joiner.open = lambda epoch, **_: [  # type: ignore[method-assign]
        EpochOpened(rank=2, epoch=0, continues=True, **other)  # type: ignore[arg-type]
    ]
    meeting.say(JoinReady(rank=2))
    assert says in joiner.refused
    meeting.finish()
    assert meeting.core.aborted is None


def paused() -> Meeting:
    """One of two that must be there has died, and the other has come to the pause."""
    meeting = Meeting(plan_of(min_ranks=2))
    meeting.move(0)
    meeting.lose(1)
    for _ in range(50 * BATCHES):
        meeting.move(0)
    assert meeting.members[0].opened is not None
    assert len(meeting.members[0].batches) < BATCHES // 2
    return meeting


def test_too_few_ranks_wait_for_another() -> None:
    meeting = paused()
    assert meeting.core.doing == "waiting for newcomers: 1 live, min_ranks=2"
    meeting.come()
    meeting.say(JoinReady(rank=2))
    meeting.finish()
    assert meeting.core.aborted is None
    assert meeting.members[2].batches


def test_too_few_ranks_end_by_name_in_time() -> None:
    meeting = paused()
    meeting.say(Tick())
    for _ in range(76):
        meeting.now_s += 4.0
        meeting.say(Tick())
    assert "waiting for newcomers: 1 live, min_ranks=2" in str(meeting.core.aborted)


def test_a_run_does_not_begin_with_too_few() -> None:
    meeting = Meeting(plan_of(min_ranks=3))
    assert "expected min_ranks of at most 2" in str(meeting.core.aborted)


STEPS = st.lists(st.sampled_from([0, 1, 2, "lose", "fail", "die"]), max_size=60)


@settings(max_examples=150, deadline=None)
@given(before=st.integers(0, 30), between=STEPS, after=STEPS, is_ready=st.booleans())
def test_it_comes_and_goes_at_any_moment(
    before: int, between: list[int | str], after: list[int | str], is_ready: bool
) -> None:
    """Whatever the joiner does, the run goes on; so it does when rank 1 dies."""
    meeting = Meeting(plan_of())

    def act(steps: list[int | str]) -> None:
        for step in steps:
            joiner = meeting.members.get(2)
            if isinstance(step, int):
                meeting.move(step)
            elif step == "lose" and joiner is not None:
                meeting.lose(2)
            elif step == "fail" and joiner is not None and not joiner.starts:
                del meeting.members[2]
                meeting.say(Failed(rank=2, error="a fault", traceback=""))
                meeting.say(RankLost(rank=2))
            elif step == "die" and 1 in meeting.members:
                meeting.lose(1)

    for number in range(before):
        meeting.move(number % 2)
    has_come = not meeting.core.is_finished
    if has_come:
        meeting.come()
        act(between)
        if is_ready and 2 in meeting.members and not meeting.core.is_finished:
            meeting.say(JoinReady(rank=2))
        act(after)
    meeting.finish()
    assert meeting.core.aborted is None
