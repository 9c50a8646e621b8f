"""Updates of the model's copies, counted in samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.copy_updates import CopySamples, DueUpdates
from tests.harness.reached import reach


@pytest.mark.reaches("a commit without an update", "a tail")
@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=30),
    parts=st.lists(st.integers(0, 90), min_size=1, max_size=60),
    epochs=st.integers(1, 4),
)
def test_as_many_updates_as_a_single_process_makes(
    sizes: list[int], parts: list[int], epochs: int
) -> None:
    """However windows cut the epochs; and never ahead of what is committed."""
    due, made, length = DueUpdates(), 0, sum(sizes)
    reach("a tail", len(set(sizes)) > 1)
    for epoch in range(epochs):
        left = length
        for part in (*parts, length):
            more = min(part, left)
            left -= more
            count = due.take(more, len(sizes), length)
            reach("a commit without an update", more > 0 and not count)
            made += count
            done = epoch * length + length - left
            assert made * length <= done * len(sizes) < (made + 1) * length
        assert made == (epoch + 1) * len(sizes)


@pytest.mark.reaches("a copy that is waited for", "an idle rank", "the last window")
@given(
    windows=st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=3, max_size=3),
        min_size=1,
        max_size=6,
    ),
    idle=st.sets(st.integers(0, 2), max_size=2),
)
def test_every_sample_counts_once_for_its_copy(
    windows: list[list[list[int]]], idle: set[int]
) -> None:
    """When every rank that has work knows the copy, or the epoch ends."""
    counted, brought, seen = [0] * 3, [0] * 3, CopySamples()
    for number, samples in enumerate(windows):
        is_last = number == len(windows) - 1
        for each in samples:
            for place, count in enumerate(each):
                counted[place] += count
        ready = seen.closed(dict(enumerate(samples)), idle, is_last=is_last)
        for place, count in enumerate(ready):
            brought[place] += count
        known = min(len(samples[r]) for r in range(3) if r not in idle)
        assert is_last or len(ready) == known
        reach("a copy that is waited for", brought != counted)
        reach("an idle rank", len(idle))
    reach("the last window")
    assert brought == counted
