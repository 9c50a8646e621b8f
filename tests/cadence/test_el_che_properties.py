"""El Che's invariants under any reports, and in a closed loop with noise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.el_che import ElChe, ElCheConfig
from elche.cadence.throughput import DOMINANCE_MARGIN, MAX_SPEED_RATIO
from tests.harness.reached import reach

times = st.floats(0.0, 1e7) | st.floats(0.0, 1e30)
hints = st.floats(0.01, 100.0)


@st.composite
def configs(draw: st.DrawFn) -> ElCheConfig:
    world_size = draw(st.integers(1, 6))
    return ElCheConfig(
        world_size=world_size,
        anchor=draw(st.integers(1, 60)),
        max_anchor=draw(st.integers(0, 200)),
        overhead_target=draw(st.floats(0.0, 1.0)),
        max_batch_diff=draw(st.none() | st.integers(0, 50)),
        speed_hints=draw(
            st.none()
            | st.lists(hints, min_size=world_size, max_size=world_size)
            | st.dictionaries(st.integers(0, world_size - 1), hints)
        ),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[ElChe, list[tuple[list[float], list[int], float]]]:
    """An ElChe and reports of any kind, idle ranks and zeros among them."""
    config = draw(configs())
    size = config.world_size
    walls = st.lists(times, min_size=size, max_size=size)
    counts = st.lists(st.integers(0, 400), min_size=size, max_size=size)
    reports = st.lists(st.tuples(walls, counts, times), max_size=12)
    return ElChe(config), draw(reports)


@given(runs(), st.floats(0.0, 1e12))
@settings(max_examples=200, deadline=None)
def test_windows_last_as_long_as_room_is_asked_for(
    run: tuple[ElChe, list[tuple[list[float], list[int], float]]], least_ms: float
) -> None:
    che, reports = run
    for wall_ms, counts, sync_ms in reports:
        che.report_timing(wall_ms, counts, sync_ms)
    before = che.anchor
    che.make_room(least_ms)  # the first: nothing was raised that could be given back
    assert before <= che.anchor <= max(1, before, che.max_anchor)
    if che.is_calibrated and che.enabled:
        longest_ms = che.max_anchor * che.anchor_wall_ms / che.anchor
        assert che.anchor_wall_ms >= min(least_ms, longest_ms) * (1 - 1e-6)
    else:
        assert che.anchor == before


@pytest.mark.reaches("given back", "fixed")
@given(
    runs(), st.lists(st.floats(0.0, 1e12), min_size=1, max_size=4), st.floats(0.0, 1e6)
)
@settings(max_examples=500, deadline=None)
def test_room_for_pauses_is_given_back(
    run: tuple[ElChe, list[tuple[list[float], list[int], float]]],
    pauses_ms: list[float],
    least_ms: float,
) -> None:
    """However long reductions took: a normal one brings the anchor back near it."""
    che, reports = run
    for wall_ms, counts, sync_ms in reports:
        che.report_timing(wall_ms, counts, sync_ms)
    before = che.anchor
    for pause_ms in pauses_ms:
        che.make_room(pause_ms)
    raised = che.anchor
    che.make_room(least_ms)
    reach("given back" if che.anchor < raised else "")
    reach("" if che.is_calibrated and che.enabled else "fixed")
    if che.is_calibrated and che.enabled:
        batch_ms = che.anchor_wall_ms / che.anchor
        least = min(least_ms / batch_ms + 1.0, che.max_anchor)
        assert che.anchor <= max(before, 2.0 * least)
    else:
        assert che.anchor == before


@given(runs(), st.data())
@settings(max_examples=200, deadline=None)
def test_invariants_hold_after_any_reports(
    run: tuple[ElChe, list[tuple[list[float], list[int], float]]], data: st.DataObject
) -> None:
    che, reports = run
    for wall_ms, counts, sync_ms in reports:
        before, anchor, was_calibrated = che.batch_counts, che.anchor, che.is_calibrated
        che.report_timing(wall_ms, counts, sync_ms)
        assert len(che.batch_counts) == che.world_size
        assert min(che.batch_counts) >= 1
        assert che.anchor <= max(1, che.max_anchor)
        assert min(che.min_anchor, anchor) <= che.anchor <= 2 * anchor
        if che.max_batch_diff is not None and was_calibrated:
            moves = zip(before, che.batch_counts, strict=True)
            assert max(abs(a - b) for a, b in moves) <= che.max_batch_diff
        if che.enabled and che.max_batch_diff is None:
            # all counts from one anchor: the reference's own is the anchor
            assert che.anchor in che.batch_counts
        if not che.enabled:
            assert set(che.batch_counts) == {1}
        if che.is_calibrated:
            fastest = min(ms for ms in che.ms_per_batch if ms > 0)
            slowest = min(max(che.ms_per_batch), MAX_SPEED_RATIO * fastest)
            least = che.anchor * slowest / (1 + DOMINANCE_MARGIN)
            assert che.anchor_wall_ms >= least * (1 - 1e-9)
        else:
            assert che.anchor_wall_ms == 0.0
        if data.draw(st.booleans(), label="nudge"):
            was = che.anchor
            che.nudge_anchor_down(data.draw(st.floats(-1.0, 2.0), label="factor"))
            assert max(1, was // 10) <= che.anchor <= was


def closed_loop(
    che: ElChe, ms: list[float], sync_ms: float, windows: int, rng: random.Random
) -> None:
    """Every batch of a rank takes its time within 10 %, and El Che hears of it."""
    for _ in range(windows):
        counts = che.batch_counts
        wall_ms = [
            sum(cost * rng.uniform(0.9, 1.1) for _ in range(n))
            for cost, n in zip(ms, counts, strict=True)
        ]
        che.report_timing(wall_ms, counts, sync_ms * rng.uniform(0.95, 1.05))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ms", [[10.0, 40.0], [10.0, 15.0, 25.0, 40.0]])
@pytest.mark.parametrize(("sync_ms", "anchor"), [(3.0, 10), (11.0, 2), (30.0, 10)])
def test_emulated_ranks_converge(
    ms: list[float], sync_ms: float, anchor: int, seed: int
) -> None:
    che = ElChe(ElCheConfig(world_size=len(ms), anchor=anchor))
    closed_loop(che, ms, sync_ms, 30, random.Random(seed))
    assert sync_ms / (che.anchor * 40.0) <= 0.03 * 1.02
    assert che.anchor <= max(anchor, 1.15 * sync_ms / (40.0 * 0.03) + 1)
    for cost, count in zip(ms, che.batch_counts, strict=True):
        ideal = che.anchor * 40.0 / cost
        assert abs(count - ideal) <= max(1.0, 0.04 * ideal + 0.5)
