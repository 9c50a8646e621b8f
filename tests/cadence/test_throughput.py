"""Hints of speeds, costs that they complete, and ratios that hold steady."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.throughput import (
    DOMINANCE_MARGIN,
    MAX_SPEED_RATIO,
    HeldRatios,
    check_reports,
    complete_costs,
    relative_speeds,
)
from elche.errors import ConfigError

costs = st.floats(1e-6, 1e6)


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (None, (1.0, 1.0, 1.0)),
        ({1: 0.4}, (1.0, 0.4, 1.0)),
        ([2.0, 1.0, 0.5], (1.0, 0.5, 0.25)),
        ({0: 4.0}, (1.0, 0.25, 0.25)),
        ({}, (1.0, 1.0, 1.0)),
        ([1.0, 1e-300, 1.0], (1.0, 1.0 / MAX_SPEED_RATIO, 1.0)),
    ],
)
def test_hints_become_speeds_relative_to_the_fastest(
    hints: object, expected: tuple[float, ...]
) -> None:
    assert relative_speeds(hints, 3) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ([1.0], "each of 2 ranks, got 1"),
        ({2: 1.0}, "names rank 2, but ranks are 0 to 1"),
        ({-1: 1.0}, "names rank -1"),
        ([1.0, 0.0], "rank 1 must be positive"),
        ([math.nan, 1.0], "rank 0 must be positive"),
        ([1.0, math.inf], "rank 1 must be positive"),
    ],
)
def test_wrong_hints_are_refused(hints: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        relative_speeds(hints, 2)  # type: ignore[arg-type]


def test_unmeasured_ranks_count_like_the_slowest_or_by_their_hint() -> None:
    assert complete_costs([10.0, 40.0, 0.0], (1.0, 1.0, 1.0)) == [10.0, 40.0, 40.0]
    assert complete_costs([10.0, 40.0, 0.0], (1.0, 0.25, 0.5)) == [10.0, 40.0, 20.0]
    assert complete_costs([0.0, 0.0], (1.0, 0.5)) == [1.0, 2.0]


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


def test_reports_name_the_rank_that_is_wrong() -> None:
    def check(work: list[object], times: list[float]) -> list[tuple[int, int, float]]:
        return check_reports("batches", work, "wall_ms", times, 2)  # type: ignore[arg-type]

    assert check([0, 2], [1.0, 4.0]) == [(1, 2, 4.0)]
    assert check([3, 2], [0.0, 4.0]) == [(1, 2, 4.0)]
    with pytest.raises(ConfigError, match="wall_ms of rank 1 must be finite"):
        check([1, 1], [1.0, math.nan])
    assert check([1, 2], [1e-300, 4.0]) == [(1, 2, 4.0)]
    with pytest.raises(ConfigError, match="wall_ms of rank 0 is not a time"):
        check([1, 1], [1e300, 1.0])
    with pytest.raises(ConfigError, match="batches of rank 0 must be at least 0"):
        check([-1, 1], [1.0, 1.0])
    with pytest.raises(ConfigError, match="batches of rank 0 must be an integer"):
        check([1.5, 1], [1.0, 1.0])
    with pytest.raises(ConfigError, match="wall_ms must hold one value for each of 2"):
        check([1, 1], [1.0])
