"""Statistics of repeated benchmark runs."""

from __future__ import annotations

import pytest

from benchmarks.paired import Interval, paired_interval, spread, student_t_95
from elche.errors import ConfigError


def test_spread_is_relative_to_the_median() -> None:
    assert spread([90.0, 100.0, 120.0]) == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="needs a median above zero"):
        spread([])
    with pytest.raises(ConfigError, match="needs a median above zero"):
        spread([0.0, 0.0])


def test_paired_interval_of_a_worked_example() -> None:
    interval = paired_interval([1.1, 2.2, 3.0, 4.1, 5.1], [1.0, 2.0, 3.0, 4.0, 5.0])
    # differences .1 .2 0 .1 .1: mean .1, standard deviation .0707, t(4) 2.7764
    assert interval.mean == pytest.approx(0.1)
    assert interval.high - interval.mean == pytest.approx(2.7764 * 0.0707107 / 5**0.5)
    assert interval.low == pytest.approx(2 * interval.mean - interval.high)
    assert 0.15 in interval
    assert 0.0 not in Interval(0.1, 0.05, 0.15)


def test_intervals_need_pairs() -> None:
    with pytest.raises(ConfigError, match="at least two pairs"):
        paired_interval([1.0], [1.0])
    with pytest.raises(ConfigError, match="got 2 and 3 values"):
        paired_interval([1.0, 2.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (4, 2.776), (30, 2.042), (31, 2.0395), (60, 2.0003), (1000, 1.9623)],
)
def test_student_t_agrees_with_published_tables(degrees: int, quantile: float) -> None:
    assert student_t_95(degrees) == pytest.approx(quantile, abs=5e-4)
