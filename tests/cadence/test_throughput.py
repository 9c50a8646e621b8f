"""Hints of speeds, costs that they complete, and ratios that hold steady."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.throughput import (
    DOMINANCE_MARGIN,
    HeldRatios,
)

costs = st.floats(1e-6, 1e6)


def test_near_equal_ranks_do_not_take_turns_as_the_reference() -> None:
    ratios = HeldRatios([1.0, 1.05])
    assert ratios.reference == 1
    ratios.follow([1.0 + DOMINANCE_MARGIN, 1.05])
    assert ratios.reference == 1
    ratios.follow([1.2, 1.05])
    assert ratios.reference == 0
    assert ratios.values[0] == 1.0


def test_the_dead_zone_is_wide_at_first_and_narrow_for_what_lasts() -> None:
    fresh = HeldRatios([4.0, 1.0])
    fresh.follow([4.0, 1.0 / 1.09])
    assert fresh.values == [1.0, 4.0]
    fresh.follow([4.0, 1.0 / 1.12])
    assert fresh.values == pytest.approx([1.0, 4.48])
    lasting = HeldRatios([4.0, 1.0])
    reports = 0
    while lasting.values[1] == 4.0:
        lasting.follow([4.0, 1.0 / 1.048])
        reports += 1
    assert reports == 5  # 10 % / sqrt(5) is below 4.8 %
    for _ in range(100):
        lasting.follow([4.0, 1.0 / 1.048 / 1.029])
    assert lasting.values[1] == pytest.approx(4.192)


@given(st.lists(st.lists(costs, min_size=3, max_size=3), min_size=1, max_size=10))
@settings(max_examples=100)
def test_held_ratios_share_one_reference_and_stay_near(rows: list[list[float]]) -> None:
    ratios = HeldRatios(rows[0])
    for row in rows[1:]:
        ratios.follow(row)
    last = rows[-1]
    assert ratios.values[ratios.reference] == pytest.approx(1.0)
    assert max(last) <= last[ratios.reference] * (1 + DOMINANCE_MARGIN)
    for rank, value in enumerate(ratios.values):
        measured = last[ratios.reference] / last[rank]
        assert abs(measured - value) <= 0.1001 * value
