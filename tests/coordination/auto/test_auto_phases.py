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
from elche.coordination.auto import auto_policy
from elche.coordination.auto.auto_policy import AutoPolicy, _Phase
from elche.coordination.policy import Member
from elche.coordination.protocol.events import (
    EpochLeft,
    StepsDone,
    WindowReduced,
)
from elche.coordination.protocol.instructions import (
    GrantSteps,
    Instruction,
    SwitchPolicy,
)
from elche.coordination.sync import step_grants
from elche.sim.cluster import Cluster as SimulatedCluster
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

    def observe(self, cluster: MeasuredCluster) -> Choice:
        is_alone = self._left.pop(0)
        return Choice(
            policy="sync",
            anchor=1,
            left_out=tuple(cluster.ranks[1:]) if is_alone else (),
            prediction=predict("sync", cluster, [0] if is_alone else None),
            alternatives=(),
            changed=True,
            reason="as the test wants",
        )


class Windows:
    """In place of a chooser: always windows of all ranks."""

    def __init__(self, **_: object) -> None:
        pass

    def fix_update(self, update: str) -> None:
        assert update == "parameters"

    def observe(self, cluster: MeasuredCluster) -> Choice:
        return Choice(
            policy="async",
            anchor=2,
            left_out=(),
            prediction=predict("async", cluster),
            alternatives=(),
            changed=True,
            reason="as the test wants",
        )


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> AutoPolicy:
    """Of two ranks; windows are better by far once anything is measured."""
    monkeypatch.setattr(auto_policy, "Chooser", Windows)
    members = [Member(rank, "CPU", 3) for rank in range(2)]
    return AutoPolicy(members, Settings(config=RunConfig(policy="auto"), epochs=2))


def begin(policy: AutoPolicy, epoch: int, sync_s: float) -> list[GrantSteps]:
    policy.prepare_epoch(sync_s, alike=True)
    sizes = BatchSizes.of([BATCH] * STEPS)
    return granted(policy.begin_epoch(epoch, sizes, 0.0).instructions)


def granted(told: list[Instruction]) -> list[GrantSteps]:
    """What rank 0 was granted."""
    return [each for each in told if isinstance(each, GrantSteps) and each.rank == 0]


def done(grant: GrantSteps, rank: int, shown_s: float = 0.09) -> StepsDone:
    steps = grant.stop - grant.start
    return StepsDone(
        rank=rank,
        epoch=0,
        start=grant.start,
        stop=grant.stop,
        samples=steps * grant.shares[rank],
        busy_s=0.01 * steps,
        data_wait_s=0.0,
        sync_wait_s=shown_s * steps,
        warm=grant.start > 0,
        backward_passes=grant.stop,
    )


def test_windows_do_not_take_over_an_epoch_that_a_loop_has_left(
    policy: AutoPolicy,
) -> None:
    """They are chosen when the last rank has run what was granted, which is all."""
    (first,) = begin(policy, 0, sync_s=0.5)
    policy.handle(done(first, 0), 1.0)
    (warm,) = granted(policy.handle(done(first, 1), 1.0).instructions)
    policy.handle(done(warm, 0), 1.0)
    policy.handle(EpochLeft(rank=0, epoch=0, step=2), 1.0)
    chosen = policy.handle(done(warm, 1), 1.0)
    assert policy._phase is _Phase.LEAVING
    assert not any(isinstance(each, SwitchPolicy) for each in chosen.instructions)
    taken = WindowReduced(
        rank=0, epoch=0, window=0, sync_s=0.1, wait_s=0.0, divergence=0.0, adopted_at=0
    )
    assert not policy.handle(taken, 1.0).epoch_over
    assert policy.handle(replace(taken, rank=1), 1.0).epoch_over
    assert not begin(policy, 1, sync_s=0.5)
    assert (policy.name, policy._phase) == ("async", _Phase.WINDOWS)


def test_without_a_rank_the_other_takes_all_steps_and_nothing_is_chosen(
    policy: AutoPolicy,
) -> None:
    """While they were measured, they were granted one by one."""
    (first,) = begin(policy, 0, sync_s=0.0001)
    told = [policy.handle(done(first, rank, 0.0), 1.0) for rank in range(2)]
    (second,) = granted(told[1].instructions)
    assert (second.start, policy._phase) == (1, _Phase.CALIBRATING)
    lose(policy, 1, 1, [0])
    waiting = begin(policy, 0, sync_s=0.0001)
    assert len(waiting) > 1
    while waiting:
        outcome = policy.handle(done(waiting.pop(0), 0), 1.0)
        waiting += granted(outcome.instructions)
        assert not any(isinstance(each, SwitchPolicy) for each in outcome.instructions)
        assert outcome.epoch_over == (not waiting)
    assert (policy.name, policy._phase) == ("sync", _Phase.FIXED)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Phases of the policy, one after the other."""
    phases: list[str] = []

    def note(policy: AutoPolicy, name: str, value: object) -> None:
        object.__setattr__(policy, name, value)
        if isinstance(value, _Phase):
            phases.append(value.name)

    monkeypatch.setattr(AutoPolicy, "__setattr__", note)
    return phases


def a_slow_link() -> SimulatedCluster:
    return cluster_of(1.0, 0.5, sync_batches=8.0, samples=32_000, epochs=2)


def a_link_that_comes_back() -> SimulatedCluster:
    cluster = cluster_of(1.0, 1.0, sync_batches=0.05, samples=16_000, epochs=12)
    return changed_link(cluster, 10.0, 150.0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (a_slow_link, "CALIBRATING LEAVING WINDOWS"),
        (
            a_link_that_comes_back,
            "CALIBRATING STEPS LEAVING ALONE TRIAL LEAVING ALONE TRIAL STEPS",
        ),
    ],
)
def test_phases_follow_each_other_as_drawn(
    make: Callable[[], SimulatedCluster], expected: str, seen: list[str]
) -> None:
    simulate(make())
    changes = [phase for phase, _ in itertools.groupby(seen)]
    assert changes == expected.split()


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> AutoPolicy:
    """Of three ranks; windows are better by far once anything is measured."""
    monkeypatch.setattr(auto_policy, "Chooser", Windows)
    members = [Member(rank, "CPU", 3) for rank in range(3)]
    return AutoPolicy(members, Settings(config=RunConfig(policy="auto"), epochs=2))


def lose(policy: AutoPolicy, rank: int, step: int, others: list[int]) -> None:
    """A rank dies as in a launcher's run: its part is missing from a step on."""
    policy.remove(rank)
    for other in others:
        policy.arrived(other, ((rank, step),))
    outcome = policy.regrouped(dict.fromkeys(others, step - 1), 1.0)
    assert not outcome.epoch_over
    for other in others:
        taken = WindowReduced(
            rank=other,
            epoch=0,
            window=step - 1,
            sync_s=0.0,
            wait_s=0.0,
            divergence=0.0,
            adopted_at=0,
        )
        outcome = policy.handle(taken, 1.0)
    assert outcome.epoch_over
    assert policy.is_cut
    assert policy.positions_left == ((step * BATCH, STEPS * BATCH),)
    assert policy.steps_left == STEPS - step


def test_steps_are_measured_on_where_a_rank_has_died(three: AutoPolicy) -> None:
    """What was measured of the others counts; the choice is of them alone."""
    (first,) = begin(three, 0, sync_s=0.0001)
    for rank in range(3):
        three.handle(done(first, rank, 0.0), 1.0)
    lose(three, 1, 1, [0, 2])
    assert three._phase is _Phase.CALIBRATING
    waiting = begin(three, 0, sync_s=0.0001)
    while three._phase is _Phase.CALIBRATING:
        step = waiting.pop(0)
        assert step.shares[1] == 0
        for rank in (0, 2):
            waiting += granted(three.handle(done(step, rank), 1.0).instructions)
    assert three._chosen.now.prediction.world_size == 2


@pytest.mark.parametrize(
    ("last", "phase"), [(True, _Phase.ALONE), (False, _Phase.TRIAL)]
)
def test_a_death_before_one_rank_trains_alone(
    last: bool, phase: _Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others choose anew: it does all the same, or steps are tried again."""
    monkeypatch.setattr(Turns, "alone", (False, True, last))
    monkeypatch.setattr(auto_policy, "OBSERVED_GRANTS", 4)
    monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)
    monkeypatch.setattr(auto_policy, "Chooser", Turns)
    members = [Member(rank, "CPU", 3) for rank in range(4)]
    policy = AutoPolicy(members, Settings(config=RunConfig(policy="auto"), epochs=2))
    waiting, step = begin(policy, 0, sync_s=0.0001), 0
    while policy._phase is not _Phase.LEAVING:
        step = waiting[0].stop
        for rank in range(4):
            told = policy.handle(done(waiting[0], rank, 0.0), 1.0).instructions
            waiting += granted(told)
        waiting.pop(0)
    assert waiting, "nothing is granted ahead"
    lose(policy, 1, step, [0, 2, 3])
    begun = begin(policy, 0, sync_s=0.0001)
    assert policy._phase is phase
    assert bool(begun) == (phase is _Phase.TRIAL)
    if phase is _Phase.ALONE:
        assert policy._switch.idle == {2, 3}
        assert policy.loss_limits.sole_holders == {0}
