"""What unequal devices share by guess is one step at a time, and few of them."""

from __future__ import annotations

from typing import Any

import pytest

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.policy import Member
from elche.coordination.protocol.events import EpochCut, StepsDone
from elche.coordination.protocol.instructions import GrantSteps, Instruction
from elche.coordination.sync.sync_policy import SyncPolicy
from tests.harness.settings import nested

BATCH, HORIZON, STEPS = 32, 3, 40
SECONDS_PER_SAMPLE = (0.01, 0.04)


def run_epoch(devices: tuple[str, str], **options: Any) -> list[tuple[int, GrantSteps]]:
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
            report = StepsDone(
                rank=rank,
                epoch=0,
                start=grant.start,
                stop=grant.stop,
                samples=samples,
                busy_s=SECONDS_PER_SAMPLE[rank] * samples,
                data_wait_s=0.0,
                sync_wait_s=0.0,
                warm=grant.start > 0,
                backward_passes=grant.stop,
            )
            told += core.handle(report, 0.0).instructions
            core.check()
        seen += [(grant.stop, new) for new in grants(told)]
    assert seen[-1][1].stop == STEPS
    return seen


def grants(told: list[Instruction]) -> list[GrantSteps]:
    return [each for each in told if isinstance(each, GrantSteps) and each.rank == 0]


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
