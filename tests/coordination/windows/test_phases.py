"""Phases of windows: transitions out of order are refused by name."""

from __future__ import annotations

import pytest

from elche.coordination.protocol.events import WindowClosed
from elche.coordination.windows.window_book import Part, WindowBook
from elche.errors import ProtocolError, TransitionError
from tests.coordination.windows.test_window_loop import opened

CLOSED = WindowClosed(rank=0, epoch=0, window=0, state="", changed_buffers=())


def follow(calls: str) -> Part:
    """A rank's part of a window after these calls."""
    part = Part()
    for call in calls.split():
        if call == "open":
            part.open(opened(), is_diverged=False, is_drained=False)
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
