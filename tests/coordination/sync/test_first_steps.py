"""What unequal devices share by guess is one step at a time, and few of them."""

from __future__ import annotations

from typing import Any

import pytest

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.policy import Member
from elche.coordination.protocol.events import EpochCut, EpochLeft, StepsDone
from elche.coordination.protocol.instructions import GrantBatches, Instruction
from elche.coordination.sync.step_reports import EARLY
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.errors import ProtocolError
from tests.coordination.test_core import steps_done
from tests.harness.settings import nested

BATCH, HORIZON, STEPS = 32, 3, 40
SECONDS_PER_SAMPLE = (0.01, 0.04)


def run_epoch(
    devices: tuple[str, str], **options: Any
) -> list[tuple[int, GrantBatches]]:
    """Grants of an epoch, each with the steps that had been run when it came."""
    members = [Member(rank, name, HORIZON) for rank, name in enumerate(devices)]
    core = SyncPolicy(members, Settings(config=RunConfig(**nested(options))))
    sizes = BatchSizes.of([BATCH] * STEPS)
    seen = [(0, g) for g in grants(core.begin_epoch(0, sizes, 0.0).instructions)]
    run = 0
    while run < len(seen):
        _, grant = seen[run]
        run += 1
        told: list[Instruction] = []
        for rank, share in enumerate(grant.shares):
            samples = share * (grant.stop - grant.start)
            busy_s = SECONDS_PER_SAMPLE[rank] * samples
            said = {"samples": samples, "busy_s": busy_s, "warm": grant.start > 0}
            done = steps_done(rank, grant.start, grant.stop, **said)
            told += core.handle(done, 0.0).instructions
            core.check()
        seen += [(grant.stop, new) for new in grants(told)]
    assert seen[-1][1].stop == STEPS
    return seen


def grants(told: list[Instruction]) -> list[GrantBatches]:
    return [each for each in told if isinstance(each, GrantBatches) and each.rank == 0]


def test_unequal_devices_share_by_guess_two_steps_at_most() -> None:
    # Once: as many as loaders draw ahead and two more, each as slow as the slowest.
    seen = run_epoch(("fast", "slow"))
    by_guess = [grant for _, grant in seen if grant.shares == (16, 16)]
    assert [(grant.start, grant.stop) for grant in by_guess] == [(0, 1), (1, 2)]
    ahead = [grant.stop - done for done, grant in seen if done == 2]
    assert max(ahead) > HORIZON  # from then on nobody waits for a message


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
    first = [grant for done, grant in run_epoch(devices, **options) if done == 0]
    assert first[-1].stop > HORIZON


def test_an_epoch_that_ranks_wait_to_join_grants_nothing_before() -> None:
    """It may be so short that it would be granted whole at its beginning."""
    members = [Member(rank, "CPU", HORIZON) for rank in range(2)]
    core = SyncPolicy(members, Settings(config=RunConfig()))
    assert not core.make_room(True)
    assert not core.begin_epoch(0, BatchSizes.of([BATCH] * 4), 0.0).instructions
    assert core.handle(EpochCut(rank=0, epoch=0), 0.0).epoch_over
    assert core.positions_left == ((0, 4 * BATCH),)
    assert not core.make_room(False)


def report(rank: int, grant: GrantBatches, unknown: str = "") -> StepsDone:
    samples = grant.shares[rank] * (grant.stop - grant.start)
    said: Any = {"samples": samples, "unknown": unknown}
    return steps_done(rank, grant.start, grant.stop, **said)


def left(rank: int) -> EpochLeft:
    return EpochLeft(
        rank=rank,
        epoch=0,
        step=0,
        samples=0,
        busy_s=0.0,
        data_wait_s=0.0,
        sync_wait_s=0.0,
    )


def begun(unknown: str) -> tuple[SyncPolicy, list[GrantBatches]]:
    """Two ranks have reported the first grant; those that they still owe."""
    members = [Member(rank, "CPU", HORIZON) for rank in range(2)]
    core = SyncPolicy(members, Settings(config=RunConfig()))
    owed = grants(core.begin_epoch(0, BatchSizes.of([BATCH] * STEPS), 0.0).instructions)
    first = owed.pop(0)
    for rank in range(2):
        owed += grants(core.handle(report(rank, first, unknown), 0.0).instructions)
    return core, owed


@pytest.mark.parametrize("unknown", [EARLY, ""])
def test_who_fetches_early_hears_that_none_are_granted_for_now(unknown: str) -> None:
    """It would wait for a grant before it reports its last step."""
    core, owed = begun(unknown)
    told = grants(core.handle(EpochCut(rank=0, epoch=0), 0.0).instructions)
    assert [(g.start, g.stop) for g in told] == [(owed[-1].stop,) * 2] * bool(unknown)
    outcomes = [
        core.handle(report(rank, grant, unknown), 0.0)
        for grant in owed
        for rank in range(2)
    ]
    assert not [each for one in outcomes for each in grants(one.instructions)]
    assert [one.epoch_over for one in outcomes] == [False] * (len(owed) * 2 - 1) + [
        True
    ]


def test_who_leaves_before_others_that_fetch_early_ends_the_run_by_name() -> None:
    """Their last backward pass would wait for it."""
    core, owed = begun(EARLY)
    assert grants(core.handle(left(1), 0.0).instructions)
    for grant in owed[:-1]:
        core.handle(report(0, grant, EARLY), 0.0)
    with pytest.raises(ProtocolError, match="left epoch 0 before ranks"):
        core.handle(report(0, owed[-1], EARLY), 0.0)


def test_nothing_is_granted_where_a_loop_has_left_and_who_waited_to_join_is_gone() -> (
    None
):
    core, owed = begun("")
    assert not core.make_room(True)
    core.handle(left(1), 0.0)
    core.handle(report(0, owed[0]), 0.0)
    assert not core.make_room(False)
