"""Phases of a rank's windows, as `WindowLoop` goes through them. Pure."""

from __future__ import annotations

from enum import Enum, auto


class WindowPhase(Enum):
    """Life of the window in hand; the next one is UNOPENED when it is closed.

    ===============  ============  ========  =========================================
    call             from          to        when
    ===============  ============  ========  =========================================
    ``OpenWindow``   UNOPENED      OPEN      its plan has come
    ``CloseWindow``  the others    CLOSING   no more work will come for it
    ``CloseWindow``  the others    DRAINING  the epoch ends early
    ``closed()``     the others    UNOPENED  this rank has closed it
    ===============  ============  ========  =========================================

    A `CloseWindow` of a window that this rank has closed itself is ignored; what else
    is out of turn is refused.
    """

    UNOPENED = auto()
    OPEN = auto()
    CLOSING = auto()
    DRAINING = auto()


class ResultPhase(Enum):
    """Progress of the result of the window that was closed last.

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

    ADOPT of an older result, for ranks that have joined, changes nothing here.
    """

    HELD = auto()
    OWED = auto()
    PLANNED = auto()
    IN_FLIGHT = auto()
