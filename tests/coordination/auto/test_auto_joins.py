"""Ranks that join a run under ``auto`` at any moment, where its epoch is cut. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elche.cadence.chooser import Choice
from elche.cadence.goodput import MeasuredCluster
from elche.coordination.auto import auto_chooser
from elche.coordination.auto.auto_chooser import AutoChooser
from elche.coordination.protocol.events import EpochCut, Event, JoinReady, StepsDone
from elche.coordination.protocol.instructions import (
    BeginEpoch,
    CloseWindow,
    EndEpoch,
    GrantBatches,
    Instruction,
    OpenWindow,
    Reduce,
    Welcome,
)
from elche.coordination.sync import step_grants
from tests.coordination.sync.granted_steps import ran
from tests.coordination.test_joining import FOUNDERS, Meeting, Member, plan_of
from tests.harness.choices import choice
from tests.harness.reached import reach

BATCH, LENGTH = 8, 60
OWN_BATCHES = 3
"""After which a rank closes its window."""
STEPS, ALONE, WINDOWS = "sync", "alone", "async"


class Wanted:
    """In place of a chooser: what a test wants, one choice after the other.

    The first one fixes the update; then each other one is of its kind.
    """

    choices: tuple[str, ...] = (STEPS,)

    def __init__(self, **_: object) -> None:
        self._left = list(self.choices)
        self._update = ""

    def fix_update(self, update: str) -> None:
        self._update = update

    def choose(self, cluster: MeasuredCluster, patience: int = 1) -> Choice:
        kind = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if self._update == "parameters":
            kind = WINDOWS
        elif self._update and kind == WINDOWS:
            kind = ALONE
        policy = WINDOWS if kind == WINDOWS else "sync"
        return choice(cluster, policy, [-1] if kind == ALONE else [])


class Part:
    """What is left of the epoch in each of its parts, as positions."""

    def __init__(self) -> None:
        self.positions = [[*range(BATCH * LENGTH)]]

    def end(self, part: int, told: EndEpoch) -> int:
        """The number of the next part."""
        if told.left and len(self.positions) == part + 1:
            before = self.positions[part]
            rest = [
                before[at] for start, stop in told.left for at in range(start, stop)
            ]
            self.positions.append(rest)
        return part + 1


class Trainer(Member):
    """Runs steps and windows, and notes the positions that it trains on."""

    course: Part

    def __init__(self, rank: int, *, joins: bool = False) -> None:
        super().__init__(rank, joins=joins)
        self.part = self.passes = 0
        self.granted: list[GrantBatches] = []
        self.seen: list[int] = []
        self.is_open = self.is_warm = self.closes = False

    def hear(self, told: Instruction) -> list[Event]:
        if isinstance(told, Welcome) and not self.joins:
            return self.open(0, continues=False, sizes=((BATCH, LENGTH),))
        if isinstance(told, GrantBatches) and not told.start < told.stop:
            return []  # no step for now
        if isinstance(told, GrantBatches) and told.shares:  # of steps
            self.granted.append(told)
            return []
        if isinstance(told, CloseWindow) and not self.is_open:
            return []  # it has closed by itself
        if isinstance(told, CloseWindow) and self.reduced < self.window - 1:
            self.leases = [] if told.drain else self.leases
            self.closes = True  # when it has the result of the window before
            return []
        if isinstance(told, Reduce):
            done = super().hear(told)
            closes, self.closes = self.closes, False
            self.is_open &= not closes
            return [*done, self.close()] if closes else done
        if isinstance(told, BeginEpoch):
            if self.joins and not self.starts:
                self.part = len(self.course.positions) - 1
            self.granted, self.passes, self.is_open = [], 0, False
            self.closes = False
        elif isinstance(told, (OpenWindow, CloseWindow)):
            self.is_open = isinstance(told, OpenWindow)
        elif isinstance(told, EndEpoch):
            self.part = self.course.end(self.part, told)
        return super().hear(told)

    def move(self) -> list[Event]:
        if self.opened is not None:
            return []
        if self.granted:
            return [self.run(self.granted.pop(0))]
        has_result = self.reduced >= self.window - 1
        if self.is_open and has_result and self.trained >= OWN_BATCHES:
            self.is_open = False
            return [self.close()]
        done = super().move() if self.is_open else []
        for _ in done:
            _, batch = self.batches[-1]
            self.see(batch * BATCH, (batch + 1) * BATCH)
        return done

    def run(self, grant: GrantBatches) -> StepsDone:
        """Runs its part of steps that were granted."""
        before, own = sum(grant.shares[: self.rank]), grant.shares[self.rank]
        for step in range(grant.start, grant.stop):
            first = step * BATCH + before
            self.see(first, first + own)
            self.passes += 1
        is_warm, self.is_warm = self.is_warm, True
        return ran(
            grant,
            self.rank,
            sync_wait_s=0.001 * (grant.stop - grant.start),
            warm=is_warm,
            backward_passes=self.passes,
        )

    def see(self, start: int, stop: int) -> None:
        self.seen += self.course.positions[self.part][start:stop]


class Growing(Meeting):
    """A run of `Trainer` ranks."""

    kind = Trainer

    def __init__(self, founders: int = FOUNDERS) -> None:
        Trainer.course = Part()
        super().__init__(plan_of("auto", founders=founders, leave_out=False))

    @property
    def phase(self) -> str:
        """What the ranks do."""
        assert self.core._epochs is not None
        chooser = self.core._epochs.chooser
        assert isinstance(chooser, AutoChooser)
        is_alone = chooser._trains_alone and chooser._phase.name == "WINDOWS"
        return ALONE if is_alone else chooser._phase.name

    def ready(self, rank: int) -> None:
        """A rank that has come is ready, if the run goes on."""
        if not self.core.is_finished:
            reach(f"joins while {self.phase}")
            self.say(JoinReady(rank=rank))

    def check(self) -> None:
        """All positions once, all ranks at the end, and each newcomer among them."""
        self.finish()
        assert self.core.aborted is None
        seen = Counter(at for member in self.members.values() for at in member.seen)  # type: ignore[attr-defined]
        assert seen == Counter(range(BATCH * LENGTH))


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Wanted]]:
    """Choices come as a test wants, after few measurements."""
    monkeypatch.setattr(auto_chooser, "Chooser", Wanted)
    monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)
    monkeypatch.setattr(auto_chooser, "OBSERVED_GRANTS", 4)
    yield Wanted
    Wanted.choices = (STEPS,)


MOVES = st.lists(
    st.sampled_from([0, 0, 0, 1, 1, 1, 2, 3, "cut", "comes", "is ready"]), min_size=16
)
PHASES = ("MEASURING", "STEPS", "WINDOWS", ALONE, "FIXED")


@pytest.mark.reaches(*(f"joins while {phase}" for phase in PHASES))
@given(
    founders=st.sampled_from([1, 2, 2, 2]),
    choices=st.lists(st.sampled_from([STEPS, ALONE, WINDOWS]), min_size=1, max_size=6),
    before=st.integers(0, 30),
    moves=MOVES,
)
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_ranks_join_at_any_moment(
    founders: int, choices: list[str], before: int, moves: list[int | str]
) -> None:
    Wanted.choices = tuple(choices)
    meeting = Growing(founders)
    for number in range(before):
        meeting.move(number % founders)
    coming: list[int] = []
    for move in [*moves, "comes", "is ready"]:
        if meeting.core.is_finished:
            break
        if isinstance(move, int):
            meeting.move(move)
        elif move == "cut":
            meeting.say(EpochCut(rank=0, epoch=0))
        elif move == "comes":
            coming.append(max(meeting.members) + 1)
            meeting.come(coming[-1])
        elif coming:
            meeting.ready(coming.pop())
    meeting.check()


def until(meeting: Growing, phase: str) -> None:
    """All train until the run is in this phase."""
    for _ in range(50 * LENGTH):
        if meeting.phase == phase:
            return
        for rank in list(meeting.members):
            meeting.move(rank)
    raise AssertionError(meeting.phase)


@pytest.mark.parametrize(
    ("choices", "phase", "then"),
    [
        ((STEPS,), "MEASURING", "MEASURING"),
        ((STEPS,), "STEPS", "STEPS"),
        ((STEPS, ALONE, STEPS), "LEAVING", "STEPS"),
        ((ALONE, STEPS), ALONE, ALONE),
        ((WINDOWS,), "WINDOWS", "WINDOWS"),
    ],
)
def test_what_follows_a_join(
    choices: tuple[str, ...], phase: str, then: str, wanted: type[Wanted]
) -> None:
    """The newcomer trains, at last in the next epoch if one rank trains alone."""
    wanted.choices = choices
    meeting = Growing()
    until(meeting, phase)
    meeting.come()
    meeting.ready(2)
    for _ in range(200):
        if meeting.members[2].starts:
            break
        for rank in (0, 1):
            meeting.move(rank)
    assert meeting.members[2].starts
    assert meeting.phase == then
    meeting.check()
    assert then == ALONE or meeting.members[2].seen  # type: ignore[attr-defined]
