"""The table of contenders and its statistics."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.errors import ConfigError
from elche.monitor.table import (
    COLUMNS,
    ContenderResult,
    Interval,
    contenders_to_json,
    paired_interval,
    plain_table,
    spread,
    student_t_95,
    table_rows,
    time_to_loss,
)

RESULTS = [
    ContenderResult(name="solo-0", samples_per_s=741.26, eval_loss=1.4711, gain=1.0),
    ContenderResult(
        name="elche-cadence",
        samples_per_s=905.0,
        samples_per_s_spread=0.02,
        efficiency=0.9662,
        bound=0.97,
        sample_efficiency=0.98,
        eval_loss=math.nan,
        time_to_loss_s=12.34,
        gain=1.18,
    ),
]


def test_rows_hold_a_cell_per_column() -> None:
    solo, cadence = table_rows(RESULTS)
    assert len(solo) == len(cadence) == len(COLUMNS)
    assert solo == ["solo-0", "741.3", "-", "-", "-", "1.4711", "-", "1.00x", ""]
    assert cadence[:5] == ["elche-cadence", "905.0 ±1.0%", "96.6%", "97.0%", "98%"]
    assert cadence[5:8] == ["nan", "12.3 s", "1.18x"]


def test_plain_text_is_aligned_and_omits_what_nobody_has() -> None:
    lines = plain_table(RESULTS).splitlines()
    assert lines[0].split("  ")[0] == "contender"
    assert "note" not in lines[0]
    assert lines[0].endswith("gain")
    assert len({len(line) for line in lines}) == 1
    assert plain_table([]) == ""


def test_json_has_no_numbers_that_json_lacks() -> None:
    values = json.loads(json.dumps(contenders_to_json(RESULTS), allow_nan=False))
    assert values["elche-cadence"]["efficiency"] == 0.9662
    assert values["elche-cadence"]["eval_loss"] is None
    assert "name" not in values["solo-0"]


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


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(5)
    covered = 0
    for _ in range(2000):
        theirs = [draw.gauss(0, 3) for _ in range(5)]
        ours = [value + draw.gauss(0.7, 0.2) for value in theirs]
        covered += 0.7 in paired_interval(ours, theirs)
    assert 0.93 < covered / 2000 < 0.97


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


def test_student_t_falls_towards_the_normal_quantile() -> None:
    values = [student_t_95(degrees) for degrees in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert values[-1] > 1.96
    with pytest.raises(ConfigError, match="expected degrees of freedom, got 0"):
        student_t_95(0)


def test_time_to_loss_interpolates() -> None:
    curve = [(0.0, 4.0), (10.0, 2.0), (20.0, 2.5), (30.0, 1.0)]
    assert time_to_loss(curve, 3.0) == pytest.approx(5.0)
    assert time_to_loss(curve, 2.0) == pytest.approx(10.0)
    assert time_to_loss(curve, 1.75) == pytest.approx(25.0)
    assert time_to_loss(curve, 5.0) == 0.0
    assert time_to_loss(curve, 0.5) is None
    assert time_to_loss([], 1.0) is None
    assert time_to_loss([(0.0, 3.0), (1.0, math.nan), (2.0, 1.0)], 2.0) == 1.0


losses = st.lists(st.floats(0, 10), min_size=1, max_size=20)


@given(losses, st.floats(0, 10))
def test_time_to_loss_lies_before_the_first_point_below(
    values: list[float], target: float
) -> None:
    at = time_to_loss(list(enumerate(values)), target)
    below = [index for index, loss in enumerate(values) if loss <= target]
    assert (at is None) == (not below)
    if at is not None:
        assert below[0] - 1 <= at <= below[0]
