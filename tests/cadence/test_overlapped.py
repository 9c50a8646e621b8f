"""The length of overlapped windows that the convergence table calls best."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence import overlapped
from elche.cadence.convergence import sample_efficiency
from elche.cadence.overlapped import best_anchor, overlapped_goodput
from elche.errors import ConfigError

BATCHES = st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=9)
TIMES = st.floats(0.0, 100.0)
MOST = st.integers(1, 60)


class Counted(list[float]):
    """Counts how often all of it is read."""

    read = 0

    def __iter__(self) -> Iterator[float]:
        self.read += 1
        return super().__iter__()


@given(BATCHES, TIMES, TIMES, MOST)
def test_no_other_anchor_brings_more(
    batch_s: list[float], held_s: float, late_s: float, most: int
) -> None:
    every = [
        overlapped_goodput(batch_s, anchor, held_s, late_s)
        for anchor in range(1, most + 1)
    ]
    assert all(0.0 < each <= 1.0 for each in every)
    best = best_anchor(batch_s, held_s, late_s, most)
    assert every[best - 1] == max(every)
    assert best == 1 + every.index(max(every))


@given(BATCHES, TIMES, st.floats(0.0, 1000.0), st.integers(60, 50_000))
def test_long_windows_are_found_among_some(
    batch_s: list[float], held_s: float, late_s: float, most: int
) -> None:
    best = best_anchor(batch_s, held_s, late_s, most)
    assert 1 <= best <= most
    found = overlapped_goodput(batch_s, best, held_s, late_s)
    for part in range(1, 100):
        other = max(1, most * part // 100)
        assert overlapped_goodput(batch_s, other, held_s, late_s) <= 1.01 * found


def test_many_ranks_and_lengths_are_compared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator asks at the end of every window."""
    asked = []

    def counted(policy: str, ranks: int, batches: float, lag: float) -> float:
        asked.append(batches)
        return sample_efficiency(policy, ranks, batches, lag)

    monkeypatch.setattr(overlapped, "sample_efficiency", counted)
    batch_s = Counted(0.01 * (1 + rank % 3) for rank in range(1000))
    assert best_anchor(batch_s[:2], 100.0, 50.0, 100_000) > 10_000
    assert len(asked) < 2_500
    assert best_anchor(batch_s, 100.0, 50.0, 100_000) >= 1
    assert batch_s.read < 10


@given(BATCHES, TIMES, st.floats(0.0, 1.0), st.floats(1.0, 10.0), MOST)
def test_dearer_windows_are_not_shorter(
    batch_s: list[float], held_s: float, late: float, factor: float, most: int
) -> None:
    late_s = late * max(batch_s)  # no window waits for it
    cheap = best_anchor(batch_s, held_s, late_s, most)
    assert best_anchor(batch_s, factor * held_s, late_s, most) >= cheap


@given(BATCHES, TIMES, MOST)
def test_what_costs_nothing_is_done_in_the_shortest_windows(
    batch_s: list[float], late_s: float, most: int
) -> None:
    assert best_anchor(batch_s, 0.0, 0.0, most) == 1
    worst = overlapped_goodput(batch_s, 1, 0.0, late_s)
    assert worst <= overlapped_goodput(batch_s, 1, 0.0, 0.0)


def test_two_ranks_behind_250_mbit() -> None:
    """Measured: windows of 3 batches of the slower rank; with a later average 4."""
    batch_s = (0.044, 0.165)
    assert best_anchor(batch_s, 0.006, 0.088, 200) == 3
    assert best_anchor(batch_s, 0.006, 0.132, 200) == 4
    gained = overlapped_goodput(batch_s, 3, 0.006, 0.088) - overlapped_goodput(
        batch_s, 1, 0.006, 0.088
    )
    assert gained == pytest.approx(0.040, abs=0.001)


@pytest.mark.parametrize(
    ("batch_s", "held_s", "late_s", "most", "says"),
    [
        ((), 0.1, 0.1, 9, "batch_s must be positive times, got"),
        ((1.0, 0.0), 0.1, 0.1, 9, "batch_s must be positive times, got"),
        ((1.0, 2.0), -0.1, 0.1, 9, "held_s must be finite and not negative"),
        ((1.0, 2.0), 0.1, math.nan, 9, "late_s must be finite and not negative"),
        ((1.0, 2.0), 0.1, 0.1, 0, "most must be at least 1|most"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(
    batch_s: tuple[float, ...], held_s: float, late_s: float, most: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        best_anchor(batch_s, held_s, late_s, most)
