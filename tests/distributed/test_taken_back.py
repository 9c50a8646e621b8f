"""Under windows a rank goes on from before a batch that gives no number."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from elche.runtime.coordinator import serve_in_thread
from tests.distributed.cases import Task
from tests.distributed.lost_cases import Survived, train_through_bad_samples
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

BATCH = 8
WAYS = [("cadence", "parameters"), ("cadence", "gradients"), ("async", "parameters")]


def run(
    pool: RankPool, bad: set[int], loop: str, accumulated: int, **options: Any
) -> list[Survived]:
    """An epoch of 80 batches, of which these hold a sample that gives no number."""
    settings = {"non_finite": "leave_out", "anchor": 4, "max_anchor": 4, **options}
    task = Task(samples=80 * BATCH, batch_size=BATCH, epochs=1, shuffle=False)
    task = dataclasses.replace(task, options=settings)
    samples = tuple(BATCH * batch + 3 for batch in sorted(bad))
    return pool.run(
        train_through_bad_samples,
        task,
        samples,
        loop,
        accumulated,
        case_setup=serve_in_thread,
    )


def discarded(ranks: list[Survived]) -> int:
    metrics = ranks[0].metrics
    assert metrics is not None
    assert metrics.samples + sum(metrics.discarded_samples) == sum(
        len(rank.order) for rank in ranks
    )
    return sum(metrics.discarded_samples)


def is_finite(ranks: list[Survived]) -> bool:
    return all(bool(v.isfinite().all()) for rank in ranks for v in rank.values.values())


@pytest.mark.parametrize(("policy", "update"), WAYS)
def test_a_quarter_of_bad_batches_costs_little_more_than_trying_them_twice(
    ranks2: RankPool, policy: str, update: str
) -> None:
    bad = set(random.Random(2).sample(range(80), 20))
    options = {"policy": policy, "update": update, "deterministic": True}
    ranks = run(ranks2, bad, "plain", 1, **options)
    assert ranks[0].left_out == sorted(bad)
    assert is_finite(ranks)
    seen = [index for rank in ranks for index in rank.order]
    assert all(seen.count(BATCH * batch) == 2 for batch in bad)
    # Once: 1008. Twenty batches twice are 320; the rest came before the first word.
    assert discarded(ranks) <= 480
    assert set(range(80 * BATCH)) == set(seen)


@pytest.mark.parametrize("loop", ["plain", "zeroes first"])
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_gradient_that_waits_at_a_windows_end_is_found(
    ranks2: RankPool, policy: str, loop: str
) -> None:
    """Four batches a step in windows of two: every step crosses a window's end."""
    bad = {17, 20, 46}  # of the windows that steps begin in, and end in
    options = {"policy": policy, "deterministic": True, "anchor": 2}
    ranks = run(ranks2, bad, loop, 4, **options)
    assert sorted(ranks[0].left_out) == sorted(bad)
    assert is_finite(ranks)
    metrics = ranks[0].metrics
    assert metrics is not None
    assert metrics.samples == 77 * BATCH
    # Once: what waited for a step that a later window spoilt counted, and was in none.
    stepped = set()
    for rank in ranks:
        batches = [index // BATCH for index in rank.order[::BATCH]]
        for at, batch in enumerate(batches):
            with_it = batches[at : at - at % 4 + 4]  # its step's, from here on
            if not bad & set(with_it):
                stepped.add(batch)
    assert stepped == set(range(80)) - bad
    assert discarded(ranks) > 0


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_scaler_that_has_not_stepped_yet_skips_the_first_step(
    ranks2: RankPool, policy: str
) -> None:
    """Eight batches a step in windows of two: gradients wait before any step came."""
    options = {"policy": policy, "deterministic": True, "anchor": 2, "max_anchor": 2}
    ranks = run(ranks2, {0, 1, 2, 3}, "scaler", 8, non_finite="stop", **options)
    assert [rank.ended for rank in ranks] == [("", ())] * 2
    assert is_finite(ranks)
    assert discarded(ranks) == 0
    metrics = ranks[0].metrics
    assert metrics is not None
    assert metrics.scalars["grad_scaler_skips"] > 0


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_the_batch_that_spoils_a_step_is_named(ranks2: RankPool, policy: str) -> None:
    options = {"policy": policy, "deterministic": True, "anchor": 2}
    ranks = run(ranks2, {17}, "plain", 4, non_finite="stop", **options)
    for rank in ranks:
        said, batches = rank.ended
        assert batches == ((17, 18),)
        assert f"samples {list(range(17 * BATCH, 18 * BATCH))}" in said


@pytest.mark.parametrize(
    ("policy", "optimizer_state"),
    [("cadence", "auto"), ("cadence", "average"), ("async", "auto")],
)
def test_a_second_optimizer_goes_back_as_the_first_one_does(
    ranks2: RankPool, policy: str, optimizer_state: str
) -> None:
    options = {"policy": policy, "optimizer_state": optimizer_state}
    ranks = run(ranks2, {17}, "two optimizers", 1, deterministic=True, **options)
    assert ranks[0].left_out == [17]
    assert is_finite(ranks)
    assert any(name.startswith("1 ") for name in ranks[0].values)
