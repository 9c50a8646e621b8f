"""Barriers of ranks that come and die in any order, and ranks that are silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.gathering import Barriers
from elche.coordination.liveness import SILENT_S, Liveness
from elche.coordination.protocol.events import BarrierReached
from elche.coordination.protocol.instructions import BarrierPassed
from tests.harness.reached import reach


@given(ranks=st.integers(2, 4), data=st.data())
def test_a_barrier_brings_the_text_of_the_first_who_lives(
    ranks: int, data: st.DataObject
) -> None:
    """A rank that comes to be the first by deaths sends its text when it knows."""
    barriers, alive, sent = Barriers(), {*range(ranks)}, set[int]()
    missing, told = {*range(ranks)}, barriers.passed({*range(ranks)})
    while not told:
        first, dies = min(alive), len(alive) > 1 and data.draw(st.booleans())
        come = alive & missing | ({first} - sent)
        rank = data.draw(st.sampled_from(sorted(alive if dies else come)))
        if dies:
            alive.remove(rank)
            barriers.remove(rank)
        else:
            missing.discard(rank)
            sent |= {first} & {rank}
            text = f"of {rank}" if rank == first else None
            barriers.reach(BarrierReached(rank=rank, name="a", text=text))
        told = barriers.passed(alive)
        assert bool(told) == (not alive & missing and min(alive) in sent)
    text = f"of {min(alive)}"
    assert told == [BarrierPassed(rank=r, name="a", text=text) for r in sorted(alive)]
    assert not barriers


TICK_S = 0.5
TICKS = round(SILENT_S / TICK_S)


@pytest.mark.reaches("silent", "silent again", "not quite")
@given(st.lists(st.integers(0, 2 * TICKS) | st.just(TICKS - 1), max_size=6))
def test_a_rank_is_silent_once_and_after_ten_seconds_without_a_beat(
    silences: list[int],
) -> None:
    """Each a beat, and so many ticks after it."""
    liveness, times = Liveness(TICK_S), 0
    for silence in silences:
        liveness.beat(1, "", waits=False)
        found = [liveness.tick() for _ in range(silence)]
        is_silent = silence >= TICKS
        assert [tick for tick, ranks in enumerate(found, 1) if ranks] == (
            [TICKS] if is_silent else []
        )
        assert [ranks for ranks in found if ranks] == ([[1]] if is_silent else [])
        times += is_silent
        reach("silent" if is_silent else "not quite" if silence == TICKS - 1 else "")
        reach("silent again" if times > 1 else "")


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
