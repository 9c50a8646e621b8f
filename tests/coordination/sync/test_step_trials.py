"""Trials of larger shares in steps of ``sync``, and the least share of everybody."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.policy import PolicyChooser
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import GrantBatches
from elche.coordination.state import policy_chooser
from elche.coordination.sync.sync_policy import SyncPolicy
from tests.coordination.sync.granted_steps import (
    HORIZON,
    PAIR,
    grants_in,
    members,
    ran,
    run_epoch,
)
from tests.harness.reached import reach
from tests.harness.settings import nested

BATCH = 64
Time = Callable[[int, int, int], float]
"""Seconds of a step: of a rank, with so many samples, at its number."""


def grants_of(
    chooser: PolicyChooser, sizes: BatchSizes, step_s: Time
) -> list[GrantBatches]:
    """Grants of an epoch of steps, until it ends or is cut for another policy."""

    def report(grant: GrantBatches, rank: int) -> StepsDone:
        share, steps = grant.shares[rank], range(grant.start, grant.stop)
        busy_s = sum(step_s(rank, share, step) for step in steps)
        return replace(ran(grant, rank), busy_s=busy_s)

    return [grant for _, grant in grants_in(run_epoch(chooser, sizes, report))]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_a_throttled_rank_gets_its_share_back_through_trials_of_one_step(
    options: dict[str, Any],
) -> None:
    """One sample takes 50 ms, half of the batch 55, all of it 60."""

    def step_s(rank: int, share: int, step: int) -> float:
        slow = 4.0 if rank == 1 and 300 <= step < 600 else 1.0
        noise = rng.uniform(0.9, 1.1)
        return slow * noise * (0.05 + 0.00015 * share)

    rng = random.Random(0)
    config = RunConfig(leave_out=False, **nested(options))
    policy = SyncPolicy(PAIR, Settings(config=config))
    seen = grants_of(PolicyChooser(policy), BatchSizes.of([BATCH] * 1200), step_s)
    assert seen[-1].stop == 1200
    if options:
        assert {grant.shares for grant in seen} == {(32, 32)}
        return
    throttled = min(grant.shares[1] for grant in seen if 400 <= grant.start < 600)
    assert throttled <= 4
    assert seen[-1].shares[1] >= 24


def test_a_trial_is_a_single_step_and_the_next_one_comes_later() -> None:
    def step_s(rank: int, share: int, step: int) -> float:
        return (0.0, 0.003)[rank] + (0.001, 0.002)[rank] * share

    config = RunConfig(speed_hints=(1.0, 0.1))
    policy = SyncPolicy(PAIR, Settings(config=config))
    sizes = BatchSizes.of([8] * 800)
    seen = grants_of(PolicyChooser(policy), sizes, step_s)
    long = [grant for grant in seen if grant.start >= 2 * HORIZON]
    tried = [grant for grant in long if grant.stop == grant.start + 1]
    assert tried
    assert {grant.shares for grant in tried} == {(6, 2)}
    assert long[0].shares == (7, 1)
    starts = [grant.start for grant in tried]
    assert all(after - before >= 32 for before, after in itertools.pairwise(starts))
    assert long[-1].shares == (6, 2)  # it was as good, and stays


@pytest.mark.reaches(
    "a tail", "a tail smaller than the world", "unequal noisy first steps"
)
@given(
    st.integers(2, 5).flatmap(
        lambda world: st.tuples(
            st.just(world),
            st.lists(st.floats(0.1, 50.0), min_size=world, max_size=world),
            st.lists(st.floats(0.0, 50.0), min_size=world, max_size=world),
        )
    ),
    st.integers(1, 2),
    st.integers(0, 9),
    st.integers(1, 9),
    st.sampled_from(("sync", "auto")),
    st.integers(0, 2**32),
)
@settings(deadline=None)
def test_each_rank_has_samples_wherever_the_batch_allows_it(
    fleet: tuple[int, list[float], list[float]],
    least: int,
    spare: int,
    tail: int,
    policy: str,
    seed: int,
) -> None:
    """Also of noisy first steps, and while ``auto`` measures what shares cost."""
    world, cost_ms, fixed_ms = fleet
    rng = random.Random(seed)

    def step_s(rank: int, share: int, step: int) -> float:
        noise = rng.uniform(0.1, 3.0) if step < 10 else 1.0
        return 1e-3 * noise * (fixed_ms[rank] + cost_ms[rank] * (share or least))

    batch = world * least + spare
    sizes = [batch] * 30 + [max(1, batch - tail)]
    agreed = Settings(
        config=RunConfig(policy=policy, leave_out=False), min_share_samples=least
    )
    runs = policy_chooser(members(*["CPU"] * world), agreed)
    runs.prepare(1e-4, 0.0, alike=True)
    for grant in grants_of(runs, BatchSizes.of(sizes), step_s):
        total = sum(grant.shares)
        assert {total} == set(sizes[grant.start : grant.stop])
        is_first = grant.start < 10 and total == batch
        reach("unequal noisy first steps", is_first and max(grant.shares) > spare)
        reach("a tail", world * least <= total < batch)
        reach("a tail smaller than the world", total < world * least)
        if total >= world * least:
            assert min(grant.shares) >= least, grant


@pytest.mark.parametrize("hints", [None, (3.0, 1.0)], ids=str)
def test_fixed_shares_keep_columns_on_their_rank(
    hints: tuple[float, float] | None,
) -> None:
    """By the hints or equal from the first step on, however slow a rank becomes."""
    config = RunConfig(shares="fixed", speed_hints=hints)
    policy = SyncPolicy(PAIR, Settings(config=config))
    sizes = BatchSizes.of([16] * 300 + [13, 1])
    seen = grants_of(
        PolicyChooser(policy), sizes, lambda rank, share, step: 0.001 * (1 + 9 * rank)
    )
    first = (12, 4) if hints else (8, 8)
    assert {grant.shares for grant in seen if grant.stop <= 300} == {first}
    assert [grant.shares for grant in seen[-2:]] == [(first[0], 13 - first[0]), (1, 0)]
    assert max(grant.stop - grant.start for grant in seen) > 1
    policy.shares.follow([1])
    assert policy.shares.of(13, 2) == (0, 13)
