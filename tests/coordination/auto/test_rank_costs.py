"""Costs of steps by their size, from few that jitter."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.auto.rank_costs import RankCosts, common_fixed_samples

PARTS = [(16, 16), (31, 1), (20, 12), (31, 1)]
"""Samples of two ranks in the steps of a calibration."""


def measured(
    fixed_s: float, sample_s: float, sizes: list[int], jitter: float, seed: int
) -> RankCosts:
    """A rank that has run steps of these sizes."""
    rng = random.Random(seed)
    costs = RankCosts(equal=16)
    for samples in sizes:
        noise = 1.0 + rng.uniform(-jitter, jitter)
        costs.steps.append((samples, (fixed_s + samples * sample_s) * noise, 1))
    costs.learn()
    return costs


def two_ranks(
    fixed: tuple[float, float], jitter: float = 0.0, seed: int = 0
) -> list[RankCosts]:
    """Ranks of 1 and 3 ms per sample, and fixed parts of so many samples."""
    return [
        measured(
            fixed[at] * sample_s, sample_s, [part[at] for part in PARTS], jitter, seed
        )
        for at, sample_s in enumerate((0.001, 0.003))
    ]


@given(st.floats(1.0, 200.0))
def test_a_fixed_part_that_ranks_share_is_found(fixed: float) -> None:
    found = common_fixed_samples(two_ranks((fixed, fixed)))
    assert found == pytest.approx(fixed, rel=0.125)  # half a step of the search


@given(st.floats(1.0, 64.0), st.integers(0, 2**32))
def test_jitter_of_ten_percent_moves_a_whole_batch_little(
    fixed: float, seed: int
) -> None:
    """Of the rank that has run one sample and half a batch, extrapolated to two."""
    ranks = two_ranks((fixed, fixed), 0.1, seed)
    common = common_fixed_samples(ranks)
    assert common is not None
    for costs, sample_s in zip(ranks, (0.001, 0.003), strict=True):
        costs.assume(common)
        assert costs.step_s(32) == pytest.approx((fixed + 32) * sample_s, rel=0.35)


def test_a_rank_whose_steps_show_another_part_keeps_it() -> None:
    ranks = two_ranks((64.0, 1.0))
    common = common_fixed_samples(ranks)
    assert common is not None
    for costs in ranks:
        costs.assume(common)
    assert ranks[0].fixed_s == pytest.approx(0.064)
    assert ranks[1].fixed_s == pytest.approx(0.003)


def test_steps_of_one_size_show_no_fixed_part() -> None:
    ranks = [measured(0.01, 0.001, [16, 16, 17], 0.0, 0)]
    assert not ranks[0].has_spread
    assert common_fixed_samples(ranks) is None
