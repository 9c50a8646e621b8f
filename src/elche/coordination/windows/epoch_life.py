"""Phases of an epoch of windows: training, draining, the last reduction. Pure."""

from __future__ import annotations

from enum import Enum, auto

from elche.errors import TransitionError


class EpochPhase(Enum):
    """Life of an epoch of windows; any other transition is refused.

    =========  ==================  =========  =========================================
    call       from                to         when
    =========  ==================  =========  =========================================
    ``leave``  TRAINING, DRAINING  DRAINING   a rank's loop has broken off
    ``cut``    TRAINING            DRAINING   the epoch is to pause
    ``end``    TRAINING            LAST       a window has ended, and no work is left
    ``end``    DRAINING            DRAINED    likewise
    ``go_on``  LAST                TRAINING   there is work again: of a rank that was
    ``go_on``  DRAINED             DRAINING   lost in the last reduction
    =========  ==================  =========  =========================================
    """

    TRAINING = auto()
    DRAINING = auto()
    LAST = auto()
    DRAINED = auto()


_LEAVE = dict.fromkeys((EpochPhase.TRAINING, EpochPhase.DRAINING), EpochPhase.DRAINING)
_END = {
    EpochPhase.TRAINING: EpochPhase.LAST,
    EpochPhase.DRAINING: EpochPhase.DRAINED,
}
_GO_ON = {after: before for before, after in _END.items()}


class EpochLife:
    """Phase of the epoch under way."""

    def __init__(self) -> None:
        self._phase = EpochPhase.TRAINING
        self._left: set[int] = set()

    @property
    def is_draining(self) -> bool:
        """True if nothing is leased any more, and the epoch ends early."""
        return self._phase in (EpochPhase.DRAINING, EpochPhase.DRAINED)

    @property
    def is_final(self) -> bool:
        """True if the last window has ended."""
        return self._phase in (EpochPhase.LAST, EpochPhase.DRAINED)

    def has_left(self, rank: int) -> bool:
        """True if a rank's loop has broken off."""
        return rank in self._left

    def leave(self, rank: int) -> None:
        """A rank's loop has broken off."""
        self._move(_LEAVE, f"rank {rank} cannot leave its loop")
        self._left.add(rank)

    def cut(self) -> None:
        """The epoch is to pause; one that ends anyway does so as before."""
        if self._phase is EpochPhase.TRAINING:
            self._phase = EpochPhase.DRAINING

    def end(self) -> None:
        """The last window has ended."""
        self._move(_END, "a window cannot be the last one")

    def go_on(self) -> None:
        """Continues after a window that was not the last: there is work again."""
        self._move(_GO_ON, "an epoch cannot go on")

    def _move(self, moves: dict[EpochPhase, EpochPhase], refusal: str) -> None:
        if self._phase not in moves:
            raise TransitionError(f"{refusal}: the epoch is {self._phase.name}")
        self._phase = moves[self._phase]
