"""The gauge: what fits on a device beside the training, from figures alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence.prefetch_gauge import (
    MAX_DEPTH,
    PIN_ROUNDS,
    ActivationPeak,
    PinTrial,
    decide_prefetch,
)

GB = 10**9


@pytest.mark.parametrize(
    ("usable", "peak", "depth"),
    [
        (100, 20, MAX_DEPTH),  # a free card, which an inverted probe calls full
        (36, 20, 2),
        (35, 20, 1),
        (33, 20, 1),
        (32, 20, 0),
        (0, 20, 0),
        (100, 0, 2),  # a peak of nothing is a measurement
        (100, None, 1),  # careful
        (22, None, 1),  # a quarter of what is usable
        (21, None, 0),
    ],
)
def test_by_hand(usable: int, peak: int | None, depth: int) -> None:
    peak_bytes = None if peak is None else peak * GB
    assert decide_prefetch(100 * GB, usable * GB, 3 * GB, peak_bytes) == depth
    assert decide_prefetch(100 * GB, usable * GB, 0, peak_bytes) == 0


@given(st.integers(0, 20 * GB), st.integers(1, 40 * GB), st.integers(1, 4 * GB))
def test_steady_on_a_device_that_only_counts(
    model_bytes: int, step_bytes: int, batch_bytes: int
) -> None:
    """Following the gauge, no step meets a full device, and the depth settles."""
    peak, depths, held, highest = ActivationPeak(), list[int](), 0, 0
    for _ in range(6):
        active = model_bytes + held
        highest = max(highest, active + step_bytes)
        assert highest <= 100 * GB
        peak.observe(active, highest)
        usable = 100 * GB - model_bytes
        depths.append(decide_prefetch(100 * GB, usable, batch_bytes, peak.value_bytes))
        held = depths[-1] * batch_bytes
        assert peak.value_bytes == step_bytes
    assert len(set(depths)) == 1


def test_the_peak_is_that_of_a_step_and_not_of_a_buffer() -> None:
    peak = ActivationPeak()
    found = []
    for active, highest in [(10, 10), (10, 14), (7, 14), (12, 16), (12, 21), (12, 13)]:
        peak.observe(active, highest)
        found.append(peak.value_bytes)
    # Not known; measured; no new maximum; a fuller buffer; a larger step; reset.
    assert found == [None, 4, 4, 4, 9, 9]


@pytest.mark.parametrize(("pinned_s", "plain_s"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_cheaper_way_to_copy_is_kept(pinned_s: float, plain_s: float) -> None:
    trial, ways = PinTrial(), []
    for first in (10.0, *[1.0] * (2 * PIN_ROUNDS - 1)):
        ways.append(trial.pin)
        trial.observe(trial.pin, 1.0, 0)  # says nothing
        trial.observe(trial.pin, first * (pinned_s if trial.pin else plain_s), 100)
    assert ways == [True, False] * PIN_ROUNDS
    assert trial.pin is (pinned_s < plain_s)
    trial.observe(not trial.pin, 0.0, 100)  # too late
    assert trial.pin is (pinned_s < plain_s)
