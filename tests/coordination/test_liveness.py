"""Silence of ranks, counted in the coordinator's own ticks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.liveness import SILENT_S, Liveness

TICK_S = 0.5
TICKS = round(SILENT_S / TICK_S)


@given(st.lists(st.booleans(), max_size=120))
def test_a_rank_is_silent_once_and_after_ten_seconds_without_a_beat(
    beats: list[bool],
) -> None:
    liveness, quiet = Liveness(TICK_S), 0
    liveness.beat(1, "", waits=False)
    for is_beat in beats:
        if is_beat:
            liveness.beat(1, "", waits=False)
            quiet = 0
        quiet += 1
        assert liveness.tick() == ([1] if quiet == TICKS else [])


def test_who_has_never_beaten_or_is_gone_is_not_watched() -> None:
    liveness = Liveness(TICK_S)
    liveness.beat(2, "", waits=False)
    liveness.forget(2)
    assert not any(liveness.tick() for _ in range(3 * TICKS))


def test_late_ranks_are_named_only_where_others_wait() -> None:
    liveness = Liveness(TICK_S)
    liveness.beat(1, "save (train.py:7)", waits=False)
    liveness.beat(0, "", waits=False)
    assert liveness.late() == ""
    liveness.beat(0, "", waits=True)
    assert liveness.late() == "rank 1 is at save (train.py:7)"
