"""The life of a run under ``auto``: its phases, and what comes between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from elche.cadence.chooser import Choice
from elche.cadence.goodput import MeasuredCluster, predict
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto import auto_chooser
from elche.coordination.auto.auto_chooser import AutoChooser, _Phase
from elche.coordination.policy import Member
from elche.coordination.protocol.events import (
    EpochLeft,
    ModelUpdated,
    StepsDone,
)
from elche.coordination.protocol.instructions import GrantBatches, Instruction
from elche.coordination.sync import step_grants
from elche.sim.cluster import Cluster as SimulatedCluster
from tests.coordination.test_core import reduced, steps_done
from tests.sim.checks import simulate
from tests.sim.test_auto import changed_link, cluster_of

BATCH = 8
STEPS = 40


class Turns:
    """In place of a chooser: all in steps, or the first one alone, as they come."""

    alone: tuple[bool, ...] = ()

    def __init__(self, **_: object) -> None:
        self._left = list(self.alone)

    def fix_update(self, update: str) -> None:
        assert update == "gradients"

    def choose(self, cluster: MeasuredCluster, patience: int = 1) -> Choice:
        is_alone = self._left.pop(0)
        return Choice(
            policy="sync",
            anchor=1,
            left_out=tuple(cluster.ranks[1:]) if is_alone else (),
            prediction=predict("sync", cluster, [0] if is_alone else None),
            alternatives=(),
            reason="as the test wants",
        )


class Windows:
    """In place of a chooser: always windows of all ranks."""

    def __init__(self, **_: object) -> None:
        pass

    def fix_update(self, update: str) -> None:
        assert update == "parameters"

    def choose(self, cluster: MeasuredCluster, patience: int = 1) -> Choice:
        return Choice(
            policy="async",
            anchor=2,
            left_out=(),
            prediction=predict("async", cluster),
            alternatives=(),
            reason="as the test wants",
        )


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> AutoChooser:
    """Of two ranks; windows are better by far once anything is measured."""
    monkeypatch.setattr(auto_chooser, "Chooser", Windows)
    members = [Member(rank, "CPU", 3) for rank in range(2)]
    return AutoChooser(members, Settings(config=RunConfig(policy="auto"), epochs=2))


def begin(auto: AutoChooser, epoch: int, sync_s: float) -> list[GrantBatches]:
    auto.prepare(sync_s, 0.0, alike=True)
    sizes = BatchSizes.of([BATCH] * STEPS)
    return granted(auto.begin_epoch(epoch, sizes, 0.0).instructions)


def granted(told: list[Instruction]) -> list[GrantBatches]:
    """What rank 0 was granted."""
    return [each for each in told if isinstance(each, GrantBatches) and each.rank == 0]


def done(grant: GrantBatches, rank: int, shown_s: float = 0.09) -> StepsDone:
    steps = grant.stop - grant.start
    return steps_done(
        rank,
        grant.start,
        grant.stop,
        samples=steps * grant.shares[rank],
        busy_s=0.01 * steps,
        sync_wait_s=shown_s * steps,
        warm=grant.start > 0,
    )


def test_an_epoch_is_not_cut_for_windows_where_a_loop_has_left_it(
    auto: AutoChooser,
) -> None:
    """They are chosen when the last rank has run what was granted, which is all."""
    (first,) = begin(auto, 0, sync_s=0.5)
    policy = auto.policy
    policy.handle(done(first, 0), 1.0)
    (warm,) = granted(policy.handle(done(first, 1), 1.0).instructions)
    policy.handle(done(warm, 0), 1.0)
    policy.handle(EpochLeft(rank=0, epoch=0, step=2), 1.0)
    assert not policy.handle(done(warm, 1), 1.0).epoch_over
    assert auto._phase is _Phase.LEAVING
    for rank in range(2):
        outcome = policy.handle(taken(rank, 0), 1.0)
    assert outcome.epoch_over
    assert policy.has_left(0)
    assert not begin(auto, 1, sync_s=0.5)
    assert (auto.policy.name, auto._phase) == ("async", _Phase.WINDOWS)


def test_without_a_rank_the_other_takes_all_steps_and_nothing_is_chosen(
    auto: AutoChooser,
) -> None:
    """While they were measured, they were granted one by one."""
    (first,) = begin(auto, 0, sync_s=0.0001)
    told = [auto.policy.handle(done(first, rank, 0.0), 1.0) for rank in range(2)]
    (second,) = granted(told[1].instructions)
    assert (second.start, auto._phase) == (1, _Phase.MEASURING)
    lose(auto, 1, 1, [0])
    waiting = begin(auto, 0, sync_s=0.0001)
    assert len(waiting) > 1
    while waiting:
        outcome = auto.policy.handle(done(waiting.pop(0), 0), 1.0)
        waiting += granted(outcome.instructions)
        assert outcome.epoch_over == (not waiting)
    assert (auto.policy.name, auto._phase) == ("sync", _Phase.FIXED)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Phases of the policy, one after the other."""
    phases: list[str] = []

    def note(auto: AutoChooser, name: str, value: object) -> None:
        object.__setattr__(auto, name, value)
        if isinstance(value, _Phase):
            phases.append(value.name)

    monkeypatch.setattr(AutoChooser, "__setattr__", note)
    return phases


def a_slow_link() -> SimulatedCluster:
    return cluster_of(1.0, 0.5, sync_batches=8.0, samples=32_000, epochs=2)


def a_link_that_comes_back() -> SimulatedCluster:
    cluster = cluster_of(1.0, 1.0, sync_batches=0.05, samples=16_000, epochs=12)
    return changed_link(cluster, 10.0, 150.0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (a_slow_link, "MEASURING LEAVING WINDOWS"),
        (a_link_that_comes_back, "MEASURING STEPS LEAVING WINDOWS STEPS"),
    ],
)
def test_phases_follow_each_other_as_drawn(
    make: Callable[[], SimulatedCluster], expected: str, seen: list[str]
) -> None:
    simulate(make())
    changes = [phase for phase, _ in itertools.groupby(seen)]
    assert changes == expected.split()


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> AutoChooser:
    """Of three ranks; windows are better by far once anything is measured."""
    monkeypatch.setattr(auto_chooser, "Chooser", Windows)
    members = [Member(rank, "CPU", 3) for rank in range(3)]
    return AutoChooser(members, Settings(config=RunConfig(policy="auto"), epochs=2))


def taken(rank: int, step: int) -> ModelUpdated:
    """A rank holds the model after a step."""
    return replace(reduced(rank, step), sync_s=0.0)


def lose(auto: AutoChooser, rank: int, step: int, others: list[int]) -> None:
    """A rank dies as in a launcher's run: its part is missing from a step on."""
    auto.remove(rank)
    policy = auto.policy
    for other in others:
        policy.arrived(other, ((rank, step),))
    outcome = policy.regrouped(dict.fromkeys(others, step - 1), 1.0)
    assert not outcome.epoch_over
    for other in others:
        outcome = policy.handle(taken(other, step - 1), 1.0)
    assert outcome.epoch_over
    assert policy.is_cut
    assert policy.positions_left == ((step * BATCH, STEPS * BATCH),)
    assert policy.steps_left == STEPS - step


def test_steps_are_measured_on_where_a_rank_has_died(three: AutoChooser) -> None:
    """What was measured of the others counts; the choice is of them alone."""
    (first,) = begin(three, 0, sync_s=0.0001)
    for rank in range(3):
        three.policy.handle(done(first, rank, 0.0), 1.0)
    lose(three, 1, 1, [0, 2])
    assert three._phase is _Phase.MEASURING
    waiting = begin(three, 0, sync_s=0.0001)
    while three._phase is _Phase.MEASURING:
        step = waiting.pop(0)
        assert step.shares[1] == 0
        for rank in (0, 2):
            waiting += granted(three.policy.handle(done(step, rank), 1.0).instructions)
    assert three._chosen.prediction.world_size == 2


@pytest.mark.parametrize("last", [True, False])
def test_a_death_before_one_rank_trains_alone(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others choose anew: it does all the same, or steps go on."""
    monkeypatch.setattr(Turns, "alone", (False, True, last))
    monkeypatch.setattr(auto_chooser, "OBSERVED_GRANTS", 4)
    monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)
    monkeypatch.setattr(auto_chooser, "Chooser", Turns)
    members = [Member(rank, "CPU", 3) for rank in range(4)]
    auto = AutoChooser(members, Settings(config=RunConfig(policy="auto"), epochs=2))
    waiting, step = begin(auto, 0, sync_s=0.0001), 0
    while auto._phase is not _Phase.LEAVING:
        step = waiting[0].stop
        for rank in range(4):
            told = auto.policy.handle(done(waiting[0], rank, 0.0), 1.0).instructions
            waiting += granted(told)
        waiting.pop(0)
    assert waiting, "nothing is granted ahead"
    lose(auto, 1, step, [0, 2, 3])
    begun = begin(auto, 0, sync_s=0.0001)
    assert auto._phase is (_Phase.WINDOWS if last else _Phase.STEPS)
    assert bool(begun) != last
    if last:
        assert auto.policy.state.idle == {2, 3}  # type: ignore[union-attr]
        assert auto.loss_limits.sole_holders == {0}
