"""Windows end where whole batches of every rank do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence.window import SLACK, aligned_anchor, lost_share


@pytest.mark.parametrize(
    ("anchor", "ms", "expected"),
    [
        (6, (43.7, 164.0), 6),  # 22.5 batches, but the slow rank waits, not the fast
        (4, (43.7, 164.0), 4),  # 15.0 already
        (4, (40.0, 160.0), 4),
        (4, (40.0, 100.0), 4),
        (5, (40.0, 100.0), 6),  # 12.5, or 15
        (1, (40.0, 160.0), 1),
        (7, (10.0,), 7),
    ],
)
def test_table(anchor: int, ms: tuple[float, ...], expected: int) -> None:
    assert aligned_anchor(anchor, ms, 200) == expected


ranks = st.lists(st.floats(1.0, 1e3), min_size=1, max_size=6)


@given(st.integers(1, 60), ranks, st.integers(60, 200))
def test_never_worse_and_never_far(anchor: int, ms: list[float], most: int) -> None:
    chosen = aligned_anchor(anchor, ms, most)
    assert anchor <= chosen <= max(anchor, min(anchor * SLACK, most))
    assert lost_share(chosen, ms) <= lost_share(anchor, ms)


@given(st.integers(1, 60), ranks)
def test_lost_share_is_a_share(anchor: int, ms: list[float]) -> None:
    assert 0.0 <= lost_share(anchor, ms) < 1.0
