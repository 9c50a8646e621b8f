"""A learned cap moves shares from a step on that no loader has drawn."""

from __future__ import annotations

from typing import Any

import pytest

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.policy import PolicyChooser
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import GrantSteps
from elche.coordination.sync.sync_policy import SyncPolicy
from tests.coordination.sync.granted_steps import (
    HORIZON,
    PAIR,
    grants_in,
    ran,
    run_epoch,
)
from tests.harness.settings import nested

BATCH = 32


def policy(**options: Any) -> SyncPolicy:
    micro_batches = options.pop("micro_batches", False)
    config = RunConfig(**nested(options))
    return SyncPolicy(PAIR, Settings(config=config, micro_batches=micro_batches))


def grants_of(
    core: SyncPolicy, met_at: int = -1, cap: int = 0
) -> list[tuple[int, GrantSteps]]:
    """Steps as they are granted, and how many had been run when they were.

    Rank 0 meets the limit of its device's memory in a step, and runs micro-batches from
    then on; both are equally fast.
    """
    known = 0

    def report(grant: GrantSteps, rank: int) -> StepsDone:
        nonlocal known
        known = cap if grant.start <= met_at < grant.stop else known
        met = known if rank == 0 else 0
        return ran(grant, rank, 0.01 * grant.shares[rank], max_samples=met, warm=True)

    sizes = BatchSizes.of([BATCH] * 40)
    return grants_in(run_epoch(PolicyChooser(core), sizes, report))


def test_shares_keep_within_the_cap_from_a_stated_step_on() -> None:
    seen = grants_of(policy(), met_at=5, cap=10)
    before = [grant for done, grant in seen if done <= 5]
    after = [grant for done, grant in seen if done > 5]
    assert {grant.shares for grant in before} == {(16, 16)}
    assert {grant.shares for grant in after} == {(10, 22)}
    assert min(grant.start for grant in after) >= 6 + HORIZON
    assert max(grant.stop for grant in after) == 40


def test_given_caps_hold_from_the_first_step() -> None:
    seen = grants_of(policy(max_samples={1: 12}))
    assert {grant.shares for _, grant in seen} == {(20, 12)}


@pytest.mark.parametrize("option", ["micro_batches", "deterministic"])
def test_a_learned_cap_leaves_shares_where_it_costs_nothing_or_all_is_planned(
    option: str,
) -> None:
    """Without fixed costs two micro-batches of half the size take as long as one."""
    seen = grants_of(policy(**{option: True}), met_at=5, cap=10)
    assert {grant.shares for _, grant in seen} == {(16, 16)}
