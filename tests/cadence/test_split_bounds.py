"""Bounds of a step of whole samples: against all splits, and the fluid limit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence.split import best_step_s, given_step_s, whole_sample_bound

COSTS = st.lists(
    st.tuples(st.floats(0.01, 10.0), st.floats(0.0, 50.0)), min_size=1, max_size=3
)


@given(st.integers(1, 9), COSTS)
def test_no_split_of_whole_samples_is_shorter(
    batch: int, costs: list[tuple[float, float]]
) -> None:
    sample_s, batch_s = zip(*costs, strict=True)
    splits = itertools.product(range(batch + 1), repeat=len(costs))
    every = [given_step_s(s, sample_s, batch_s) for s in splits if sum(s) == batch]
    assert best_step_s(batch, sample_s, batch_s) == pytest.approx(min(every))


def test_the_bound_of_whole_samples_and_a_batch_that_is_large_enough() -> None:
    speeds = (1.0, 0.67, 0.4, 0.25)
    sample_s = [1 / speed for speed in speeds]
    found = whole_sample_bound(32, sample_s)
    # 14, 10, 5 and 3 samples: 10 / 0.67 = 14.93 beside 32 / 2.32 = 13.79
    assert found == (pytest.approx(0.9241, abs=1e-4), 128)
    assert whole_sample_bound(128, sample_s) is None
    assert whole_sample_bound(8, [1.0, 1.0]) is None
    assert whole_sample_bound(8, [1.0]) is None
    # batches of 6, 12 and 24 divide well, but not 7, 15 and 27
    assert whole_sample_bound(3, [1.0, 1.0]) == (pytest.approx(0.75), 48)
