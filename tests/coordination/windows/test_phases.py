"""Phases of windows: transitions out of order are refused by name."""

from __future__ import annotations

import pytest

from elche.config import RunConfig
from elche.coordination.policy import Member
from elche.coordination.protocol.events import WindowClosed
from elche.coordination.windows.reductions import Reduction
from elche.coordination.windows.window_book import Part, PartPhase, Throttle, WindowBook
from elche.coordination.windows.window_state import EpochLife, WindowState
from elche.errors import ProtocolError, TransitionError
from tests.coordination.windows.test_window_loop import reduction

CLOSED = WindowClosed(rank=0, epoch=0, window=0, changed_buffers=())


def follow(phases: str) -> Part:
    """A rank's part of a window after these phases."""
    part = Part()
    for phase in phases.split():
        part.move(PartPhase[phase])
    return part


@pytest.mark.parametrize("phases", ["CLOSED", "CLOSING", "OPEN OPEN"])
def test_a_window_is_opened_before_it_closes_and_once(phases: str) -> None:
    with pytest.raises(TransitionError, match=f"a window cannot go .*{phases[-4:]}"):
        follow(phases)
    with pytest.raises(TransitionError, match="a window cannot go from CLOSED to"):
        follow(f"OPEN CLOSING OPEN CLOSED {phases}")


@pytest.mark.parametrize("calls", ["", "OPEN CLOSED"])
def test_a_rank_closes_an_open_window_once(calls: str) -> None:
    book = WindowBook([0, 1], 0)
    book.parts[0] = follow(calls)
    with pytest.raises(ProtocolError, match="rank 0 closes window 0, expected to"):
        book.close(CLOSED)


def test_one_reduction_runs_at_a_time_until_all_hold_its_result() -> None:
    state = WindowState(RunConfig(policy="cadence"), [Member(0, "cpu", 1)])
    with pytest.raises(TransitionError, match="before all hold its result"):
        state.commit()
    running = state.begin(Reduction(reduction(), {0: Part(), 1: Part()}))
    with pytest.raises(TransitionError, match="window 1 cannot be reduced: window 0"):
        state.begin(Reduction(reduction(1), {}))
    running.remove(0)
    with pytest.raises(TransitionError, match="before all hold its result"):
        state.commit()
    running.remove(1)
    assert state.commit() is state.last is running
    assert state.running is None


@pytest.mark.parametrize("calls", ["", "leave", "leave leave"])
def test_an_epoch_ends_and_goes_on_as_it_was(calls: str) -> None:
    life = EpochLife()
    for _ in calls.split():
        life.leave(1)
    for _ in range(2):
        assert (life.is_draining, life.is_final) == (bool(calls), False)
        with pytest.raises(TransitionError, match="an epoch cannot continue"):
            life.reopen()
        life.end()
        assert (life.is_draining, life.is_final) == (bool(calls), True)
        with pytest.raises(TransitionError, match="a window cannot be the last one"):
            life.end()
        with pytest.raises(TransitionError, match="rank 0 cannot leave its loop"):
            life.leave(0)
        life.reopen()
    assert life.left == {1 for _ in calls.split()}


def test_a_throttled_rank_is_held_for_good_once_the_slowest_has_stopped() -> None:
    throttle = Throttle(2, [0, 1])
    assert not throttle.done(0, 2)
    assert not throttle.holds(2), "rank 1 may still catch up"
    assert throttle.done(1, 1)
    assert throttle.limit == 3
    throttle.stop(1)
    assert not throttle.done(1, 5), "it runs no more"
    assert [throttle.holds(batches) for batches in (2, 3)] == [False, True]
    throttle.remove(1)
    assert (throttle.limit, throttle.is_final) == (4, False)
