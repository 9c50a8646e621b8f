"""What is granted ahead: few steps by guess, and shares within learned caps."""

from __future__ import annotations

from typing import Any

import pytest

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.policy import PolicyChooser
from elche.coordination.protocol.events import EpochCut, EpochLeft, StepsDone
from elche.coordination.protocol.instructions import GrantBatches
from elche.coordination.sync.step_reports import EARLY
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.errors import ProtocolError
from tests.coordination.sync.granted_steps import (
    HORIZON,
    PAIR,
    granted,
    grants_in,
    members,
    ran,
    run_epoch,
)
from tests.harness.settings import nested

BATCH, STEPS = 32, 40
SECONDS_PER_SAMPLE = (0.01, 0.04)


def first_grants(
    devices: tuple[str, str], **options: Any
) -> list[tuple[int, GrantBatches]]:
    """Grants of an epoch, each with the steps that had been run when it came."""
    core = SyncPolicy(members(*devices), Settings(config=RunConfig(**nested(options))))

    def report(grant: GrantBatches, rank: int) -> StepsDone:
        return ran(grant, rank, SECONDS_PER_SAMPLE[rank] * grant.shares[rank])

    sizes = BatchSizes.of([BATCH] * STEPS)
    seen = grants_in(run_epoch(PolicyChooser(core), sizes, report))
    assert seen[-1][1].stop == STEPS
    return seen


def test_unequal_devices_share_by_guess_two_steps_at_most() -> None:
    # Once: as many as loaders draw ahead and two more, each as slow as the slowest.
    seen = first_grants(("fast", "slow"))
    by_guess = [grant for _, grant in seen if grant.shares == (16, 16)]
    assert [(grant.start, grant.stop) for grant in by_guess] == [(0, 1), (1, 2)]
    ahead = [grant.stop - done for done, grant in seen if done == 3]
    assert max(ahead) > HORIZON  # two timed steps agree: no rank waits for a message


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (("CPU", "CPU"), {}),
        (("fast", "slow"), {"speed_hints": (4.0, 1.0)}),
        (("fast", "slow"), {"deterministic": True}),
    ],
    ids=["equal", "hints", "deterministic"],
)
def test_where_nothing_is_guessed_steps_are_granted_ahead_at_once(
    devices: tuple[str, str], options: dict[str, Any]
) -> None:
    first = [grant for done, grant in first_grants(devices, **options) if done == 0]
    assert first[-1].stop > HORIZON


def test_an_epoch_that_ranks_wait_to_join_grants_nothing_before() -> None:
    """It may be so short that it would be granted whole at its beginning."""
    core = SyncPolicy(PAIR, Settings(config=RunConfig()))
    assert not core.make_room(True)
    assert not core.begin_epoch(0, BatchSizes.of([BATCH] * 4), 0.0).instructions
    assert core.handle(EpochCut(rank=0, epoch=0), 0.0).epoch_over
    assert core.positions_left == ((0, 4 * BATCH),)
    assert not core.make_room(False)


def left(rank: int) -> EpochLeft:
    return EpochLeft(rank=rank, epoch=0, step=0)


def begun(unknown: str) -> tuple[SyncPolicy, list[GrantBatches]]:
    """Two ranks have reported the first grant; those that they still owe."""
    core = SyncPolicy(PAIR, Settings(config=RunConfig()))
    sizes = BatchSizes.of([BATCH] * STEPS)
    owed = granted(core.begin_epoch(0, sizes, 0.0).instructions)
    first = owed.pop(0)
    for rank in range(2):
        done = ran(first, rank, unknown=unknown)
        owed += granted(core.handle(done, 0.0).instructions)
    return core, owed


@pytest.mark.parametrize("unknown", [EARLY, ""])
def test_who_fetches_early_hears_that_none_are_granted_for_now(unknown: str) -> None:
    """It would wait for a grant before it reports its last step."""
    core, owed = begun(unknown)
    told = granted(core.handle(EpochCut(rank=0, epoch=0), 0.0).instructions)
    assert [(g.start, g.stop) for g in told] == [(owed[-1].stop,) * 2] * bool(unknown)
    outcomes = [
        core.handle(ran(grant, rank, unknown=unknown), 0.0)
        for grant in owed
        for rank in range(2)
    ]
    assert not [each for one in outcomes for each in granted(one.instructions)]
    assert [one.epoch_over for one in outcomes] == [False] * (len(owed) * 2 - 1) + [
        True
    ]


def test_who_leaves_before_others_that_fetch_early_ends_the_run_by_name() -> None:
    """Their last backward pass would wait for it."""
    core, owed = begun(EARLY)
    assert granted(core.handle(left(1), 0.0).instructions)
    for grant in owed[:-1]:
        core.handle(ran(grant, 0, unknown=EARLY), 0.0)
    with pytest.raises(ProtocolError, match="left epoch 0 before ranks"):
        core.handle(ran(owed[-1], 0, unknown=EARLY), 0.0)


def test_nothing_is_granted_where_a_loop_has_left_and_who_waited_to_join_is_gone() -> (
    None
):
    core, owed = begun("")
    assert not core.make_room(True)
    core.handle(left(1), 0.0)
    core.handle(ran(owed[0], 0), 0.0)
    assert not core.make_room(False)


def grants_with_cap(
    met_at: int = -1, cap: int = 0, *, micro_batches: bool = False, **options: Any
) -> list[tuple[int, GrantBatches]]:
    """Steps as they are granted, and how many had been run when they were.

    Rank 0 meets the limit of its device's memory in a step, and runs micro-batches from
    then on; both are equally fast.
    """
    known, config = 0, RunConfig(**nested(options))
    core = SyncPolicy(PAIR, Settings(config=config, micro_batches=micro_batches))

    def report(grant: GrantBatches, rank: int) -> StepsDone:
        nonlocal known
        known = cap if grant.start <= met_at < grant.stop else known
        met = known if rank == 0 else 0
        return ran(grant, rank, 0.01 * grant.shares[rank], max_samples=met, warm=True)

    sizes = BatchSizes.of([BATCH] * 40)
    return grants_in(run_epoch(PolicyChooser(core), sizes, report))


def test_shares_keep_within_the_cap_from_a_stated_step_on() -> None:
    seen = grants_with_cap(5, 10)
    before = [grant for done, grant in seen if done <= 5]
    after = [grant for done, grant in seen if done > 5]
    assert {grant.shares for grant in before} == {(16, 16)}
    assert {grant.shares for grant in after} == {(10, 22)}
    assert min(grant.start for grant in after) >= 6 + HORIZON
    assert max(grant.stop for grant in after) == 40


def test_given_caps_hold_from_the_first_step() -> None:
    seen = grants_with_cap(max_samples={1: 12})
    assert {grant.shares for _, grant in seen} == {(20, 12)}


@pytest.mark.parametrize("option", ["micro_batches", "deterministic"])
def test_a_learned_cap_leaves_shares_where_it_costs_nothing_or_all_is_planned(
    option: str,
) -> None:
    """Without fixed costs two micro-batches of half the size take as long as one."""
    seen = grants_with_cap(5, 10, **{option: True})
    assert {grant.shares for _, grant in seen} == {(16, 16)}
