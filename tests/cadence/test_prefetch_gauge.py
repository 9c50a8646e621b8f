"""The gauge: what fits on a device beside the training, from figures alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elche.cadence.prefetch_gauge import (
    CAREFUL_DEPTH,
    PIN_ROUNDS,
    RESERVE_FRACTION,
    ActivationPeak,
    PinTrial,
    decide_prefetch,
)

GB = 10**9


depths = st.integers(0, 8)


@st.composite
def readings(draw: st.DrawFn) -> dict[str, Any]:
    total = draw(st.integers(0, 200 * GB))
    free = draw(st.integers(0, total))
    return {
        "total_bytes": total,
        "free_bytes": free,
        "held_bytes": draw(st.integers(0, total - free)),
        "batch_bytes": draw(st.integers(0, 20 * GB)),
        "peak_bytes": draw(st.none() | st.integers(0, 200 * GB)),
        "max_depth": draw(depths),
    }


@given(readings())
def test_never_more_than_fits(reading: dict[str, Any]) -> None:
    depth = decide_prefetch(**reading)
    assert 0 <= depth <= reading["max_depth"]
    reserve = math.ceil(reading["total_bytes"] * RESERVE_FRACTION)
    usable = reading["free_bytes"] + reading["held_bytes"]
    batch, peak = reading["batch_bytes"], reading["peak_bytes"]
    if depth:
        assert batch > 0
        assert depth * batch + (peak or 0) + reserve <= usable
    if peak is None:
        assert depth <= CAREFUL_DEPTH


@given(readings(), st.integers(0, 200 * GB))
def test_less_free_memory_never_gets_more(reading: dict[str, Any], taken: int) -> None:
    less = reading | {"free_bytes": max(0, reading["free_bytes"] - taken)}
    assert decide_prefetch(**less) <= decide_prefetch(**reading)


@given(readings(), st.integers(0, 20 * GB))
def test_a_filled_buffer_does_not_change_the_answer(
    reading: dict[str, Any], moved: int
) -> None:
    """flodl's next depth fell to zero once its buffer was full."""
    assume(moved <= reading["free_bytes"])
    fuller = reading | {
        "free_bytes": reading["free_bytes"] - moved,
        "held_bytes": reading["held_bytes"] + moved,
    }
    assert decide_prefetch(**fuller) == decide_prefetch(**reading)


@pytest.mark.parametrize(
    ("free", "peak", "depth"),
    [
        (100 * GB, 20 * GB, 4),  # a free card, which an inverted probe calls full
        (63 * GB, 20 * GB, 4),
        (62 * GB, 20 * GB, 4),
        (39 * GB, 20 * GB, 3),
        (33 * GB, 20 * GB, 1),
        (32 * GB, 20 * GB, 0),
        (5 * GB, 20 * GB, 0),
        (0, 20 * GB, 0),
        (100 * GB, 0, 4),  # a peak of nothing is a measurement
        (100 * GB, None, 1),  # careful
        (34 * GB, None, 1),
        (33 * GB, None, 1),  # a quarter of what is usable
        (21 * GB, None, 0),
    ],
)
def test_by_hand(free: int, peak: int | None, depth: int) -> None:
    found = decide_prefetch(
        total_bytes=100 * GB,
        free_bytes=free,
        held_bytes=0,
        batch_bytes=3 * GB,
        peak_bytes=peak,
        max_depth=4,
    )
    assert found == depth


def test_the_peak_is_that_of_a_step_and_not_of_a_buffer() -> None:
    peak = ActivationPeak()
    assert peak.value_bytes is None
    peak.observe(active_bytes=10, peak_bytes=10)
    assert peak.value_bytes is None  # reset by the program just before: not known
    peak.observe(active_bytes=10, peak_bytes=14)
    assert peak.value_bytes == 4
    peak.observe(active_bytes=7, peak_bytes=14)  # an emptied buffer, no new maximum
    assert peak.value_bytes == 4
    peak.observe(active_bytes=12, peak_bytes=16)  # a fuller one
    assert peak.value_bytes == 4
    peak.observe(active_bytes=12, peak_bytes=21)  # a larger step
    assert peak.value_bytes == 9
    peak.observe(active_bytes=12, peak_bytes=13)  # reset
    assert peak.value_bytes == 9


@pytest.mark.parametrize(("pinned_s", "plain_s"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_cheaper_way_to_copy_is_kept(pinned_s: float, plain_s: float) -> None:
    trial, ways = PinTrial(), []
    for first in (10.0, *[1.0] * (2 * PIN_ROUNDS - 1)):
        assert not trial.is_over
        ways.append(trial.pin)
        trial.observe(trial.pin, first * (pinned_s if trial.pin else plain_s), 100)
    assert ways == [True, False] * PIN_ROUNDS
    assert trial.is_over
    assert trial.pin is (pinned_s < plain_s)
    trial.observe(not trial.pin, 0.0, 100)  # too late
    assert trial.pin is (pinned_s < plain_s)


def test_an_empty_batch_says_nothing_about_pinning() -> None:
    trial = PinTrial()
    for _ in range(4 * PIN_ROUNDS):
        trial.observe(trial.pin, 1.0, 0)
    assert not trial.is_over
