"""The gate that holds what follows from the journal until a successor has that too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final


@final
class WriteGate:
    """Carries out actions in order, each when the pieces before it are written.

    Attributes:
        pieces: of the journal so far.
        holds: actions wait; else each piece is written at once.
    """

    def __init__(self) -> None:
        self.pieces = 0
        self.holds = False
        self._written = 0
        self._held: deque[tuple[int, Callable[[], None]]] = deque()

    def act(self, action: Callable[[], None]) -> None:
        """Does it now, or when all pieces so far are written."""
        if self._held or (self.holds and self._written < self.pieces):
            self._held.append((self.pieces, action))
        else:
            action()

    def written(self, pieces: int) -> None:
        """So many pieces are written."""
        self._written = max(self._written, pieces)
        while self._held and self._held[0][0] <= self._written:
            self._held.popleft()[1]()

    def open(self) -> None:
        """Nothing is held any more."""
        self.holds = False
        self.written(self.pieces)
