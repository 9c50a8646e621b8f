"""Barriers of ranks that come and die in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.gathering import Barriers
from elche.coordination.protocol.events import BarrierReached
from elche.coordination.protocol.instructions import BarrierPassed


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
