"""A learned cap moves shares from a step on that no loader has drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elche.cadence.split import passes_of
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.policy import Member
from elche.coordination.protocol.instructions import GrantBatches, Instruction
from elche.coordination.sync.sync_policy import SyncPolicy
from tests.coordination.test_core import steps_done
from tests.harness.settings import nested

BATCH, HORIZON = 32, 3


def policy(**options: Any) -> SyncPolicy:
    members = [Member(rank, "CPU", HORIZON) for rank in range(2)]
    micro_batches = options.pop("micro_batches", False)
    config = RunConfig(**nested(options))
    return SyncPolicy(members, Settings(config=config, micro_batches=micro_batches))


def grants(told: list[Instruction]) -> list[GrantBatches]:
    return [each for each in told if isinstance(each, GrantBatches) and each.rank == 0]


def run_epoch(
    core: SyncPolicy, met_at: int = -1, cap: int = 0, fixed_s: float = 0.0
) -> Iterator[tuple[int, GrantBatches]]:
    """Steps as they are granted, and how many had been run when they were.

    Rank 0 meets the limit of its device's memory in a step, and runs micro-batches from
    then on; both are equally fast, and each micro-batch costs them ``fixed_s``.
    """
    waiting = grants(core.begin_epoch(0, BatchSizes.of([BATCH] * 40), 0.0).instructions)
    done, known = 0, 0
    for grant in waiting:
        yield 0, grant
    while waiting:
        grant = waiting.pop(0)
        if grant.start <= met_at < grant.stop:
            known = cap
        told: list[Instruction] = []
        for rank, share in enumerate(grant.shares):
            passes = passes_of(share, known or None) if rank == 0 else 1
            step_s = 0.01 * share + fixed_s * passes
            told += core.handle(
                steps_done(
                    rank,
                    grant.start,
                    grant.stop,
                    samples=share * (grant.stop - grant.start),
                    busy_s=step_s * (grant.stop - grant.start),
                    max_samples=known if rank == 0 else 0,
                ),
                0.0,
            ).instructions
            core.check()
        done = grant.stop
        for new in grants(told):
            waiting.append(new)
            yield done, new


def test_shares_keep_within_the_cap_from_a_stated_step_on() -> None:
    seen = list(run_epoch(policy(), met_at=5, cap=10))
    before = [grant for done, grant in seen if done <= 5]
    after = [grant for done, grant in seen if done > 5]
    assert {grant.shares for grant in before} == {(16, 16)}
    assert {grant.shares for grant in after} == {(10, 22)}
    assert min(grant.start for grant in after) >= 6 + HORIZON
    assert max(grant.stop for grant in after) == 40


def test_given_caps_hold_from_the_first_step() -> None:
    seen = list(run_epoch(policy(max_samples={1: 12})))
    assert {grant.shares for _, grant in seen} == {(20, 12)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"micro_batches": True}, (16, 16)), ({"deterministic": True}, (16, 16))],
)
def test_a_learned_cap_leaves_shares_where_it_costs_nothing_or_all_is_planned(
    options: dict[str, Any], expected: tuple[int, int]
) -> None:
    """Without fixed costs two micro-batches of half the size take as long as one."""
    seen = list(run_epoch(policy(**options), met_at=5, cap=10))
    assert {grant.shares for _, grant in seen} == {expected}
