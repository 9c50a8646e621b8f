"""The life of a run under ``auto``: its phases, and what comes between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto import auto_chooser
from elche.coordination.auto.auto_chooser import AutoChooser, _Phase
from elche.coordination.protocol.events import EpochLeft, ModelUpdated, StepsDone
from elche.coordination.protocol.instructions import GrantBatches
from elche.coordination.sync import step_grants
from tests.coordination.sync.granted_steps import granted, members, ran
from tests.coordination.test_core import reduced
from tests.harness.choices import want

BATCH = 8
STEPS = 40
NEWCOMER = members(*["CPU"] * 5)[4]


WINDOWS, STEPS_OF_ALL, ALONE = ("async", ()), ("sync", ()), ("sync", (0,))


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> AutoChooser:
    """Of two ranks; windows are better by far once anything is measured."""
    want(monkeypatch, WINDOWS)
    return of(2)


def of(ranks: int) -> AutoChooser:
    settings = Settings(config=RunConfig(policy="auto"), epochs=2)
    return AutoChooser(members(*["CPU"] * ranks), settings)


def begin(auto: AutoChooser, epoch: int, sync_s: float) -> list[GrantBatches]:
    auto.prepare(sync_s, 0.0, alike=True)
    sizes = BatchSizes.of([BATCH] * STEPS)
    told = granted(auto.begin_epoch(epoch, sizes, 0.0).instructions)
    return [each for each in told if each.shares]  # steps, not local batches


def done(grant: GrantBatches, rank: int, shown_s: float = 0.09) -> StepsDone:
    return ran(grant, rank, sync_wait_s=shown_s * (grant.stop - grant.start))


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


def test_steps_are_measured_on_where_a_rank_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was measured of the others counts; the choice is of them alone."""
    want(monkeypatch, WINDOWS)
    auto = of(3)
    (first,) = begin(auto, 0, sync_s=0.0001)
    for rank in range(3):
        auto.policy.handle(done(first, rank, 0.0), 1.0)
    lose(auto, 1, 1, [0, 2])
    assert auto._phase is _Phase.MEASURING
    waiting = begin(auto, 0, sync_s=0.0001)
    while auto._phase is _Phase.MEASURING:
        step = waiting.pop(0)
        assert step.shares[1] == 0
        for rank in (0, 2):
            waiting += granted(auto.policy.handle(done(step, rank), 1.0).instructions)
    assert auto._chosen.prediction.world_size == 2


def leaving(
    monkeypatch: pytest.MonkeyPatch, *choices: tuple[str, tuple[int, ...]]
) -> tuple[AutoChooser, list[GrantBatches]]:
    """Of four ranks that leave their steps, and granted ones that they still run."""
    want(monkeypatch, *choices)
    monkeypatch.setattr(auto_chooser, "OBSERVED_GRANTS", 4)
    monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)
    auto = of(4)
    waiting = begin(auto, 0, sync_s=0.0001)
    while auto._phase is not _Phase.LEAVING:
        step = waiting.pop(0)
        for rank in range(4):
            told = auto.policy.handle(done(step, rank, 0.0), 1.0).instructions
            waiting += granted(told)
    assert waiting, "nothing is granted ahead"
    return auto, waiting


@pytest.mark.parametrize("last", [True, False])
def test_a_death_before_one_rank_trains_alone(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others choose anew: it does all the same, or steps go on."""
    choices = STEPS_OF_ALL, ALONE, ALONE if last else STEPS_OF_ALL
    auto, waiting = leaving(monkeypatch, *choices)
    lose(auto, 1, waiting[0].start, [0, 2, 3])
    begun = begin(auto, 0, sync_s=0.0001)
    assert auto._phase is (_Phase.WINDOWS if last else _Phase.STEPS)
    assert bool(begun) != last
    if last:
        state = auto.policy.state  # type: ignore[union-attr]
        assert state.idle == {2, 3}
        pace = state.pacing.pace()
        assert state.samples_of(0, pace)[1] == BATCH * pace.batches[0]
        assert auto.loss_limits.sole_holders == {0}
    assert auto._measures.sync_s > 0.0
    auto.remove(3)
    assert auto._sync._members.keys() == {0, 2}  # in windows too
    auto.add(NEWCOMER)
    assert auto._measures.sync_s == 0.0  # it is measured anew


@pytest.mark.parametrize("last", [ALONE, STEPS_OF_ALL, WINDOWS])
def test_who_joins_is_chosen_for(
    last: tuple[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before one rank trains alone, which it does all the same, and while it does."""
    auto, waiting = leaving(monkeypatch, STEPS_OF_ALL, ALONE, last, STEPS_OF_ALL)
    for step in waiting:
        for rank in range(4):
            outcome = auto.policy.handle(done(step, rank, 0.0), 1.0)
    assert outcome.epoch_over
    auto.add(NEWCOMER)
    begun = begin(auto, 0, sync_s=0.0001)
    assert auto._phase is (_Phase.STEPS if last is STEPS_OF_ALL else _Phase.WINDOWS)
    if last is STEPS_OF_ALL:
        assert all(begun[0].shares)
        return
    state = auto.policy.state  # type: ignore[union-attr]
    assert state.idle == ({1, 2, 3, 4} if last is ALONE else set())
    auto.add(members(*["CPU"] * 6)[5])
    assert 5 in state.idle, "before the next epoch it has no work"
    if last is ALONE:
        assert all(begin(auto, 1, sync_s=0.0001)[0].shares)
        assert auto.state_from == 0


@pytest.mark.parametrize(
    ("is_chosen", "name", "then"),
    [
        (False, "sync", _Phase.MEASURING),
        (True, "sync", _Phase.STEPS),
        (True, "async", _Phase.WINDOWS),
    ],
)
def test_who_joins_the_only_one_has_it_choose_again(
    is_chosen: bool, name: str, then: _Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    want(monkeypatch, (name, ()))
    auto = of(2)
    waiting = begin(auto, 0, sync_s=0.5)
    while is_chosen and auto._choice is None:
        step = waiting.pop(0)
        for rank in range(2):
            told = auto.policy.handle(done(step, rank), 1.0).instructions
            waiting += granted(told)
    if name == "async":
        begin(auto, 1, sync_s=0.5)
    auto.remove(1)
    assert auto._phase is _Phase.FIXED
    auto.add(NEWCOMER)
    assert auto._phase is then
    assert auto._sync._members.keys() == {0, 4}
