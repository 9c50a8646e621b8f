"""Phases of a rank's windows, and their transitions in `WindowLoop`. Pure."""

from __future__ import annotations

from enum import Enum, auto


class WindowPhase(Enum):
    """Phases of the current window; after its close the next window is UNOPENED.

    ===============  ============  ========  =========================================
    call             from          to        when
    ===============  ============  ========  =========================================
    ``OpenWindow``   UNOPENED      OPEN      its plan is received
    ``CloseWindow``  the others    CLOSING   the window gets no more work
    ``CloseWindow``  the others    DRAINING  the epoch ends early
    ``closed()``     the others    UNOPENED  this rank has closed it
    ===============  ============  ========  =========================================

    A `CloseWindow` for a window that this rank has closed already is ignored; any other
    call out of turn is refused.
    """

    UNOPENED = auto()
    OPEN = auto()
    CLOSING = auto()
    DRAINING = auto()


class ResultPhase(Enum):
    """Phases of the result of the last closed window.

    ===============  ==================  =========  ===================================
    call             from                to         when
    ===============  ==================  =========  ===================================
    ``closed()``     HELD                OWED       this rank has closed a window
    ``OpenWindow``   OWED                HELD       ``cadence``, if no rank has trained
    ``Reduce``       OWED                PLANNED    all ranks have closed it
    ``begun()``      PLANNED             IN_FLIGHT  ``async``: BEGIN is done
    ``reduced()``    PLANNED, IN_FLIGHT  HELD       REDUCE or FINISH is done
    ``reduced()``    OWED                HELD       ADOPT is done, of this result
    ``regrouped()``  PLANNED, IN_FLIGHT  OWED       the reduction is void
    ===============  ==================  =========  ===================================

    ADOPT of an older result, for ranks that have joined, changes no phase.
    """

    HELD = auto()
    OWED = auto()
    PLANNED = auto()
    IN_FLIGHT = auto()
