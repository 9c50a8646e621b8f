"""How long overlapped windows last beside a slow link."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence.goodput import (
    ADOPTION_BATCHES,
    LAST_CLOSER_BATCHES,
    MeasuredCluster,
    predict,
)
from elche.cadence.overlapped import ROOM, BatchTimes, best_anchor
from elche.config import RunConfig
from elche.config_parts import WindowConfig
from elche.coordination.windows.pacing import Pacing
from elche.coordination.windows.reductions import Reduction
from elche.coordination.windows.window_book import Part
from tests.coordination.test_core import reduced
from tests.coordination.windows.test_window_loop import reduction
from tests.harness.reached import reach

BATCH_S = (0.25, 1.0)
SLOWEST_S = max(BATCH_S)


def pacing(
    *, overlapped: bool = True, max_anchor: int = 200, anchor: int = 5
) -> Pacing:
    """Two ranks of which the batches are known; windows of five of the slower one."""
    policy = "async" if overlapped else "cadence"
    windows = WindowConfig(anchor=anchor, max_anchor=max_anchor)
    config = RunConfig(policy=policy, windows=windows)
    made = Pacing(config, [0, 1], overlapped=overlapped)
    parts = {
        rank: Part(batches=1, samples=8, timed=1, timed_s=batch_s)
        for rank, batch_s in enumerate(BATCH_S)
    }
    made.measure(parts, None, is_tail=True)
    return made


def test_windows_are_as_long_as_a_reduction_after_the_first_one() -> None:
    made = pacing()
    assert made.reduction_s is None
    assert made.pace().wall_s == pytest.approx(5.0)
    assert made.took(20.0) == "anchor 5 -> 24: a reduction takes 20 s"
    assert made.pace().wall_s == pytest.approx(24.0)
    assert made.pace().batches == {0: 96, 1: 24}
    assert made.took(21.0) == ""
    made.change([0])
    assert made.reduction_s is None  # of the ranks that are left


def test_a_spike_makes_no_room() -> None:
    made = pacing()
    for taken_s in (0.5, 300.0, 0.6, 0.5, 200.0, 0.5):
        assert made.took(taken_s) == ""
        assert made.pace().wall_s == pytest.approx(5.0)


def test_a_reduction_may_take_long_before_one_was_measured() -> None:
    """What a slow link asks for is not known; waiting for it would be lost."""
    made = pacing()
    assert made.pace().patience_s == pytest.approx(200.0 * SLOWEST_S)
    made.took(20.0)
    assert made.pace().patience_s == pytest.approx(48.0)
    assert pacing(max_anchor=5).pace().patience_s == pytest.approx(17.0)


@pytest.mark.reaches("last windows", "windows that are not")
@given(st.floats(0.0, 60.0), st.floats(0.001, 400.0), st.booleans())
def test_the_last_window_hides_the_reduction_before_it(
    reduction_s: float, left_s: float, overlapped: bool
) -> None:
    made = pacing(overlapped=overlapped)
    if overlapped:
        made.took(reduction_s)
    usual, last = made.pace(), made.last_pace(left_s)
    assert usual.wall_s is not None
    covered = left_s - usual.wall_s >= ROOM * reduction_s + SLOWEST_S
    if not overlapped or covered or left_s > 200.0 * SLOWEST_S:
        assert last is None
        reach("windows that are not", overlapped)
        return
    assert last is not None
    reach("last windows")
    assert last.wall_s is not None
    assert last.wall_s > max(left_s, usual.wall_s)
    planned_s = max(left_s, usual.wall_s)
    assert last.batches[1] == pytest.approx(planned_s / SLOWEST_S, abs=0.51)


def adopted(late: int, held_s: float) -> Reduction:
    """A reduction whose average the fast rank had after so many batches."""
    done = Reduction(reduction(), {0: Part(), 1: Part()})
    for rank in (0, 1):
        at = late if rank == 0 else 1
        done.reduced(replace(reduced(rank, 0), sync_s=held_s, adopted_at=at))
    return done


def whole_window() -> dict[int, Part]:
    """A batch of the slow rank, four of the fast one."""
    return {
        rank: Part(batches=4 // (1 + 3 * rank), samples=8, timed=1, timed_s=batch_s)
        for rank, batch_s in enumerate(BATCH_S)
    }


def test_windows_are_as_long_as_pays_where_that_is_more_than_a_reduction() -> None:
    made, parts = pacing(anchor=1), whole_window()
    made.took(0.5)
    assert made.pace().wall_s == pytest.approx(1.0)
    best = best_anchor(BatchTimes.of(BATCH_S), 0.01, 3 * BATCH_S[0], 200)
    assert best > 2
    said = made.measure(parts, adopted(3, 0.01), is_tail=False)
    assert said == (
        f"anchor 1 -> {best}: each window costs 10.0 ms, and its average comes 3 "
        "batches late"
    )
    assert made.pace().wall_s == pytest.approx(best * SLOWEST_S)
    made.measure(parts, adopted(3, 0.01), is_tail=False)
    made.measure(parts, adopted(90, 5.0), is_tail=False)  # a spike
    assert made.pace().wall_s == pytest.approx(best * SLOWEST_S)


def test_blocking_windows_know_no_lag() -> None:
    made = pacing(overlapped=False, anchor=1)
    parts = {0: Part(4, 8, 1, 0.25), 1: Part(1, 8, 1, 1.0)}
    assert made.measure(parts, adopted(3, 0.01), is_tail=False) == ""


@pytest.mark.reaches("bounded anchors", "free anchors")
@given(st.integers(2, 400), st.floats(0.0, 0.5), st.integers(1, 200))
def test_auto_predicts_the_windows_that_are_run(
    late: int, held_s: float, max_anchor: int
) -> None:
    """Where what it reckons with is what is measured."""
    fast_s, batches_per_s = BATCH_S[0], sum(1.0 / s for s in BATCH_S)
    early_s = LAST_CLOSER_BATCHES * SLOWEST_S + ADOPTION_BATCHES * fast_s
    reduction_s = late * fast_s - early_s
    cluster = MeasuredCluster(
        seconds_per_sample=[s / 8 for s in BATCH_S],
        batch_size=8,
        sync_s=reduction_s,
        copy_batches=held_s * batches_per_s / len(BATCH_S),
        max_anchor=max_anchor,
    )
    made = pacing(anchor=1, max_anchor=max_anchor)
    made.took(reduction_s)
    made.measure(whole_window(), adopted(late, held_s), is_tail=False)
    assert made.el_che.anchor == predict("async", cluster).anchor
    reach("bounded anchors", made.el_che.anchor == max_anchor)
    reach("free anchors", 1 < made.el_che.anchor < max_anchor)


@pytest.mark.parametrize("guard", [True, False])
def test_the_guard_shortens_windows_where_ranks_come_apart(guard: bool) -> None:
    windows = WindowConfig(anchor=16, max_anchor=16, guard=guard)
    config = RunConfig(policy="cadence", windows=windows)
    made = Pacing(config, [0, 1], overlapped=False)
    for window, divergence in enumerate([0.02] * 10 + [0.2, 0.4]):
        done = Reduction(reduction(window), {0: Part(), 1: Part()})
        for rank in (0, 1):
            report = replace(reduced(rank, window), divergence=divergence)
            done.reports[rank] = report
        said = made.watch(done, 16)
    assert made.el_che.anchor == (8 if guard else 16)
    assert said.startswith("anchor 16 -> 8: divergence") if guard else said == ""
