"""The divergence guard: silent in every healthy run, quick when ranks come apart."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from elche.cadence.divergence import (
    MAX_HOLD_WINDOWS,
    MEMORY_WINDOWS,
    DivergenceGuard,
    Verdict,
)
from elche.cadence.el_che import ElChe, ElCheConfig

BATCHES = 25
LEVEL = 0.02
NAN = math.nan

noise = st.floats(0.7, 1.3)


def feed(guard: DivergenceGuard, levels: Sequence[float]) -> list[Verdict]:
    return [guard.observe([level, level / 2], BATCHES) for level in levels]


def nudges(verdicts: Sequence[Verdict]) -> list[int]:
    """The windows, counted from 1, that shortened the anchor."""
    return [at for at, verdict in enumerate(verdicts, start=1) if verdict.nudge]


def settled(windows: int = 30, level: float = LEVEL) -> DivergenceGuard:
    guard = DivergenceGuard()
    assert nudges(feed(guard, [level] * windows)) == []
    return guard


@given(
    st.lists(st.tuples(noise, st.integers(1, 400)), min_size=1, max_size=60),
    st.floats(1e-6, 0.7),
    st.floats(0.0, 1.0),
    st.floats(0.9, 1.0),
    st.integers(0, 3),
    st.floats(1.0, 100.0),
)
def test_a_healthy_run_is_never_shortened(
    windows: list[tuple[float, int]],
    level: float,
    exponent: float,
    decay: float,
    larger_windows: int,
    larger: float,
) -> None:
    """Windows of any length, the worst noise, decay, a rough start, all at once."""
    longest = max(batches for _, batches in windows)
    guard = DivergenceGuard()
    for at, (factor, batches) in enumerate(windows):
        healthy = level * (batches / longest) ** exponent * factor * decay**at
        if at < larger_windows:
            healthy *= larger
        verdict = guard.observe([healthy, 0.3 * healthy, 0.0], batches)
        assert verdict.nudge is None, verdict.reason


@given(
    st.lists(st.tuples(noise, st.integers(1, 400)), min_size=1, max_size=60),
    st.floats(0.0, 1.0),
    st.integers(1, 5000),
)
def test_a_learning_rate_that_warms_up_is_healthy(
    windows: list[tuple[float, int]], exponent: float, warmup_batches: int
) -> None:
    guard, before = DivergenceGuard(), 0
    for factor, batches in windows:
        rate = min(1.0, (before + batches / 2) / warmup_batches)
        healthy = 0.03 * rate * (batches / 100) ** exponent * factor
        verdict = guard.observe([healthy], batches)
        assert verdict.nudge is None, verdict.reason
        before += batches


@given(
    st.integers(7, 60),
    st.floats(2.0, 50.0),
    st.floats(1e-3, 0.2),
    st.integers(4, 200),
    st.booleans(),
)
def test_a_scripted_divergence_halves_the_anchor_within_two_windows(
    healthy_windows: int, growth: float, level: float, anchor: int, jump: bool
) -> None:
    """Exponential from a factor of 2 per window, a jump from a factor of 4."""
    che = ElChe(ElCheConfig(world_size=2, anchor=anchor))
    guard = settled(healthy_windows, level)
    before = che.anchor
    for window in (1, 2):
        factor = max(4.0, growth) if jump else growth**window
        verdict = guard.observe([level * factor, level], BATCHES)
        if verdict.nudge is not None:
            che.nudge_anchor_down(verdict.nudge)
    assert che.anchor == math.ceil(before / 2)


def test_one_spike_holds_the_anchor_and_moves_nothing() -> None:
    guard = settled()
    spike, *after = feed(guard, [10 * LEVEL, *[LEVEL] * 20])
    assert spike.hold
    assert "windows do not grow until that is clear" in spike.reason
    assert [verdict.hold for verdict in after] == [False] * 20
    assert nudges(after) == []


def test_a_jump_to_a_new_plateau_is_answered_once() -> None:
    verdicts = feed(settled(), [6 * LEVEL] * 60)
    assert nudges(verdicts) == [2]
    held = [verdict.hold for verdict in verdicts]
    assert held == [True] * 10 + [False] * 50  # two windows, and eight after them


def test_each_nudge_holds_the_anchor_twice_as_long() -> None:
    guard = DivergenceGuard()
    feed(guard, [LEVEL] * 30)
    level, held = LEVEL, []
    for _ in range(7):
        level *= 4
        guard.observe([level], BATCHES)
        assert guard.observe([level], BATCHES).nudge == 0.5
        after = feed(guard, [level] * 100)
        held.append(sum(verdict.hold for verdict in after))
        level /= 4
        feed(guard, [level] * 30)
    assert held == [8, 16, 32, *[MAX_HOLD_WINDOWS] * 4]


def test_above_the_ceiling_no_baseline_is_needed() -> None:
    verdicts = feed(DivergenceGuard(), [1.5] * 12)
    assert nudges(verdicts) == [4, 6, 8, 10, 12]
    assert all(verdict.hold for verdict in verdicts)
    assert "above the ceiling 1" in verdicts[0].reason


def test_a_start_far_above_the_ceiling_that_falls_is_left_alone() -> None:
    levels = [20.0 * 0.4**at for at in range(10)]
    verdicts = feed(DivergenceGuard(), levels)
    assert nudges(verdicts) == []


def test_a_contribution_that_is_not_finite_holds_then_shortens() -> None:
    guard = DivergenceGuard()
    first = guard.observe([LEVEL, NAN, LEVEL], BATCHES)
    assert (first.hold, first.nudge) == (True, None)
    assert "contribution of rank 1 is not finite" in first.reason
    second = guard.observe([math.inf, LEVEL, NAN], BATCHES)
    assert (second.hold, second.nudge) == (True, 0.5)
    assert "contribution of ranks 0, 2 is not finite" in second.reason
    assert "of 6 ranks is not finite" in guard.observe([NAN] * 6, BATCHES).reason


def test_the_level_of_the_others_counts_beside_one_that_is_not_finite() -> None:
    guard = settled()
    guard.observe([NAN, LEVEL], BATCHES)
    after = feed(guard, [LEVEL] * 10)
    assert nudges(after) == []
    assert "0.90 times the usual 0.0221" in after[0].reason


def test_the_furthest_rank_is_judged_and_named() -> None:
    guard = settled()
    guard.observe([LEVEL, LEVEL, 5 * LEVEL], BATCHES)
    verdict = guard.observe([LEVEL, LEVEL, 6 * LEVEL], BATCHES)
    assert verdict.nudge == 0.5
    assert verdict.reason.startswith(
        "divergence 0.12 of rank 2, 5.43 times the usual 0.0221, the second"
    )


def test_a_window_without_batches_says_nothing() -> None:
    guard = settled()
    state = pickle.dumps(guard)
    verdict = guard.observe([50.0], 0)
    assert (verdict.hold, verdict.nudge) == (False, None)
    assert pickle.dumps(guard) == state


levels = st.floats(0.0, 5.0) | st.sampled_from([NAN, math.inf, 1e300])
syncs = st.tuples(st.lists(levels, min_size=1, max_size=3), st.integers(0, 300))


@given(st.lists(syncs, max_size=25))
def test_it_holds_or_lets_be_and_remembers_a_few_windows(
    windows: list[tuple[list[float], int]],
) -> None:
    guard = DivergenceGuard()
    for divergences, batches in windows:
        verdict = guard.observe(divergences, batches)
        assert verdict.hold or verdict.nudge is None
        assert len(guard._usual) <= MEMORY_WINDOWS
