"""Phases of windows: transitions out of order are refused by name."""

from __future__ import annotations

import pytest

from elche.config import RunConfig
from elche.coordination.policy import Member
from elche.coordination.protocol.events import WindowClosed
from elche.coordination.windows.reductions import Reduction
from elche.coordination.windows.window_book import Part, WindowBook
from elche.coordination.windows.window_state import EpochLife, WindowState
from elche.errors import ProtocolError, TransitionError
from tests.coordination.windows.test_window_loop import opened, reduction

CLOSED = WindowClosed(rank=0, epoch=0, window=0, changed_buffers=())


def follow(calls: str) -> Part:
    """A rank's part of a window after these calls."""
    part = Part()
    for call in calls.split():
        if call == "open":
            part.open(opened(), is_drained=False)
        elif call == "close":
            part.close(CLOSED)
        else:
            getattr(part, call)()
    return part


@pytest.mark.parametrize(
    ("calls", "phase"),
    [
        ("", "UNOPENED"),
        ("open", "OPEN"),
        ("open tell_to_close", "CLOSING"),
        ("open tell_to_close tell_again", "OPEN"),
        ("open tell_to_close close", "CLOSED"),
        ("open close", "CLOSED"),
    ],
)
def test_a_window_goes_from_phase_to_phase_and_no_other_way(
    calls: str, phase: str
) -> None:
    assert follow(calls).phase.name == phase
    following = {
        "UNOPENED": {"open"},
        "OPEN": {"tell_to_close", "close"},
        "CLOSING": {"tell_again", "close"},
        "CLOSED": set(),
    }
    for call in {"open", "tell_to_close", "tell_again", "close"} - following[phase]:
        with pytest.raises(TransitionError, match=f"cannot go from {phase} to"):
            follow(f"{calls} {call}")


@pytest.mark.parametrize("calls", ["", "open close"])
def test_a_rank_closes_an_open_window_once(calls: str) -> None:
    book = WindowBook([0, 1], 0)
    book.parts[0] = follow(calls)
    with pytest.raises(ProtocolError, match="rank 0 closes window 0, expected once"):
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
        with pytest.raises(TransitionError, match="an epoch cannot go on"):
            life.go_on()
        life.end()
        assert (life.is_draining, life.is_final) == (bool(calls), True)
        with pytest.raises(TransitionError, match="a window cannot be the last one"):
            life.end()
        with pytest.raises(TransitionError, match="rank 0 cannot leave its loop"):
            life.leave(0)
        life.go_on()
    assert life.left == {1 for _ in calls.split()}
