"""Ranks that go: their states, and what follows from each cause. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final

from elche.coordination.protocol.events import Failed, Left, RankLost
from elche.errors import TransitionError


class RankState(Enum):
    """States of a rank, as the membership has it, and the end of its run."""

    WAITING = "waiting"  # to be taken into the run
    NEW = "new"  # taken in, and has not trained yet
    MEMBER = "member"
    LEFT = "left"
    LOST = "lost"
    ENDED = "ended"


TABLE: Final = """\
state    cause         run survives  otherwise
waiting  left          lost          lost
waiting  failed        lost          lost
waiting  disconnected  lost          lost
waiting  silent        waiting       waiting
new      left          left          left
new      failed        lost          ended
new      disconnected  lost          ended
new      silent        lost          new
member   left          left          left
member   failed        ended         ended
member   disconnected  lost          ended
member   silent        lost          member
left     failed        ended         ended
left     disconnected  left          left
left     silent        left          left"""
"""The next state of a rank by its state and cause: where the run survives its loss, and
where it does not. A rank that is lost is in the run no more; `ENDED` is the run's.
"""
TRANSITIONS: Final = {
    (RankState(state), cause): (RankState(survived), RankState(fatal))
    for state, cause, survived, fatal in map(str.split, TABLE.splitlines()[1:])
}


def cause_of(event: Left | Failed | RankLost) -> str:
    """The cause by which a rank goes."""
    if isinstance(event, RankLost):
        return "silent" if event.silent_s else "disconnected"
    return "left" if isinstance(event, Left) else "failed"


def next_state(state: RankState, cause: str, *, survives: bool) -> RankState:
    """The state of a rank that goes.

    Args:
        state: of the rank.
        cause: see `cause_of`.
        survives: the run continues without the rank.

    Raises:
        TransitionError: such a rank cannot go so.
    """
    if (state, cause) not in TRANSITIONS:
        why = f"expected a transition of the table, got {state.value} and {cause}"
        raise TransitionError(f"{why}:\n{TABLE}")
    survived, fatal = TRANSITIONS[state, cause]
    return survived if survives else fatal
