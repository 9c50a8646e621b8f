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
from elche.sim.cluster import Cluster as SimulatedCluster
from tests.sim.checks import simulate
from tests.sim.test_auto import changed_link, cluster_of

BATCH = 8
STEPS = 40


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
    policy.handle(EpochLeft(rank=0, epoch=0, step=1), 1.0)
    chosen = policy.handle(done(first, 1), 1.0)
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
    policy.remove(1)
    outcome = policy.regrouped({0: 0}, 1.0)
    waiting = granted(outcome.instructions)
    assert len(waiting) > 1
    while waiting:
        assert not outcome.epoch_over
        outcome = policy.handle(done(waiting.pop(0), 0), 1.0)
        waiting += granted(outcome.instructions)
        assert not any(isinstance(each, SwitchPolicy) for each in outcome.instructions)
    assert outcome.epoch_over
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
