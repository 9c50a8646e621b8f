"""Statistics of repeated benchmark runs."""

from __future__ import annotations

import pytest

from benchmarks.paired import mean_interval, spread, student_t_95
from elche.errors import ConfigError


def test_spread_is_relative_to_the_median() -> None:
    assert spread([90.0, 100.0, 120.0]) == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="needs a median above zero"):
        spread([])
    with pytest.raises(ConfigError, match="needs a median above zero"):
        spread([0.0, 0.0])


def test_the_interval_of_a_worked_example() -> None:
    interval = mean_interval([0.1, 0.2, 0.0, 0.1, 0.1])
    # standard deviation .0707, t(4) 2.7764
    assert interval.mean == pytest.approx(0.1)
    assert interval.high - interval.mean == pytest.approx(2.7764 * 0.0707107 / 5**0.5)
    assert interval.low == pytest.approx(2 * interval.mean - interval.high)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (4, 2.776), (30, 2.042), (31, 2.0395), (60, 2.0003), (1000, 1.9623)],
)
def test_student_t_agrees_with_published_tables(degrees: int, quantile: float) -> None:
    assert student_t_95(degrees) == pytest.approx(quantile, abs=5e-4)
