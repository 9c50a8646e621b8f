"""The length of overlapped windows that the convergence table calls best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence import overlapped
from elche.cadence.convergence import table_efficiency
from elche.cadence.goodput import (
    ADOPTION_BATCHES,
    LAST_CLOSER_BATCHES,
    MeasuredCluster,
    predict,
)
from elche.cadence.overlapped import (
    BatchTimes,
    anchor_for,
    best_anchor,
    overlapped_goodput,
)

BATCHES = st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=9)
TIMES = st.floats(0.0, 100.0)
MOST = st.integers(1, 60)


@given(BATCHES, TIMES, st.floats(0.0, 1000.0), st.integers(60, 50_000))
def test_long_windows_are_found_among_some(
    batch_s: list[float], held_s: float, late_s: float, most: int
) -> None:
    times = BatchTimes.of(batch_s)
    best = best_anchor(times, held_s, late_s, most)
    assert 1 <= best <= most
    found = overlapped_goodput(times, best, held_s, late_s)
    for part in range(1, 100):
        other = max(1, most * part // 100)
        assert overlapped_goodput(times, other, held_s, late_s) <= 1.01 * found


def test_many_lengths_are_not_all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator asks at the end of every window."""
    asked = []

    def counted(policy: str, ranks: int, batches: float, lag: float) -> float:
        asked.append(batches)
        return table_efficiency(policy, ranks, batches, lag)

    monkeypatch.setattr(overlapped, "table_efficiency", counted)
    assert best_anchor(BatchTimes.of((0.01, 0.02)), 100.0, 50.0, 100_000) > 10_000
    assert len(asked) < 2_500


@given(BATCHES, TIMES, TIMES, MOST, MOST)
def test_as_long_as_a_reduction_asks_for_and_then_as_pays(
    batch_s: list[float], held_s: float, late_s: float, most: int, least: int
) -> None:
    times = BatchTimes.of(batch_s)
    allowed = range(min(least, most), most + 1)
    every = [overlapped_goodput(times, each, held_s, late_s) for each in allowed]
    best = best_anchor(times, held_s, late_s, most, least=least)
    assert best == allowed[every.index(max(every))]


@st.composite
def clusters(draw: st.DrawFn) -> MeasuredCluster:
    batch_s = draw(BATCHES)
    return MeasuredCluster(
        seconds_per_sample=[each_s / 8 for each_s in batch_s],
        batch_size=8,
        sync_batch_size=8 * len(batch_s),
        sync_s=draw(st.just(0.0) | st.floats(1e-5, 100.0)),
        copy_batches=draw(st.floats(0.0, 1.0)),
        max_anchor=draw(MOST),
        run_batches=1e12,  # of many windows, however long
    )


@given(clusters())
def test_a_prediction_is_of_the_best_windows(measured: MeasuredCluster) -> None:
    batch_s = [measured.batch_s(rank) for rank in range(measured.world_size)]
    times, found = BatchTimes.of(batch_s), predict("async", measured)
    held_s = measured.copy_batches * times.ranks / times.per_s
    late_s = measured.sync_s + LAST_CLOSER_BATCHES * times.slowest_s
    late_s += ADOPTION_BATCHES * times.fastest_s
    needed = min(anchor_for(times, measured.sync_s), measured.max_anchor)
    assert found.anchor >= needed
    brings = found.hardware_efficiency * found.sample_efficiency
    for anchor in range(needed, measured.max_anchor + 1):  # the first is the old rule's
        other = overlapped_goodput(times, anchor, held_s, late_s)
        assert brings >= other * (1.0 - 1e-9)


def test_two_ranks_behind_250_mbit() -> None:
    """Measured: windows of 3 batches of the slower rank; with a later average 4."""
    batch_s = (0.044, 0.165)
    assert best_anchor(BatchTimes.of(batch_s), 0.006, 0.088, 200) == 3
    assert best_anchor(BatchTimes.of(batch_s), 0.006, 0.132, 200) == 4
    gained = overlapped_goodput(
        BatchTimes.of(batch_s), 3, 0.006, 0.088
    ) - overlapped_goodput(BatchTimes.of(batch_s), 1, 0.006, 0.088)
    assert gained == pytest.approx(0.031, abs=0.001)
