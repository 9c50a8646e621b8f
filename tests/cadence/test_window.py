"""Where a window ends: at the batch boundary nearest to its planned length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.rank_time import RankTime
from elche.cadence.window import should_close


@pytest.mark.parametrize(
    ("elapsed_s", "batch_s", "wall_s", "batches_done", "closes"),
    [
        (0.0, 1.0, 4.0, 0, False),
        (9.0, 1.0, 4.0, 0, False),  # never without a batch
        (9.0, 1.0, 4.0, 1, True),
        (4.0, 1.0, 4.0, 4, True),
        (3.0, 1.0, 4.0, 3, False),
        (3.4, 1.0, 4.0, 3, False),  # 4.4 is nearer than 3.4
        (3.6, 1.0, 4.0, 3, True),  # 4.6 is further than 3.6
        (3.5, 1.0, 4.0, 3, False),  # as near: one more
        (3.0, 0.0, 4.0, 3, False),  # no prediction
        (1.0, math.inf, 4.0, 1, True),
        (1.0, 1.0, 0.0, 1, True),
    ],
)
def test_the_rule(
    elapsed_s: float, batch_s: float, wall_s: float, batches_done: int, closes: bool
) -> None:
    assert should_close(elapsed_s, batch_s, wall_s, batches_done) is closes


@given(st.floats(1e-4, 10.0), st.floats(1e-3, 200.0))
@settings(max_examples=200, deadline=None)
def test_constant_batches_end_at_the_nearest_boundary(
    batch_s: float, wall_s: float
) -> None:
    wall_s = min(wall_s, 300 * batch_s)
    done = 1
    while not should_close(done * batch_s, batch_s, wall_s, done):
        done += 1
    error = abs(done * batch_s - wall_s)
    slack = 1e-9 * wall_s
    nearest = max(1, round(wall_s / batch_s))
    assert error <= abs(nearest * batch_s - wall_s) + slack
    assert done == 1 or error <= batch_s / 2 + slack


@given(st.lists(st.floats(1e-3, 5.0), min_size=1, max_size=50), st.floats(1e-3, 50.0))
@settings(max_examples=100, deadline=None)
def test_a_window_always_closes_and_never_late_by_a_batch(
    taken: list[float], wall_s: float
) -> None:
    expected, now_s, done, closed = RankTime(1), 0.0, 0, False
    while not closed:
        last_s = taken[done % len(taken)]
        expected.observe(1, last_s)
        now_s += last_s
        done += 1
        closed = should_close(now_s, expected.cost, wall_s, done)
    assert now_s - last_s < wall_s * (1 + 1e-9)
