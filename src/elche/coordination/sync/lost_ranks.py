"""Steps of ``sync`` when ranks have died: whose part is in which of them. Pure.

Survivors are at most one backward pass apart, since a pass ends when all ranks have
reached it. They exchange their positions in the next group and decide alike:

    some ranks hold the sums ──► the others copy them: the dead rank's part counts
    no rank holds the sums   ──► repeat without the dead rank: its samples remain

All survivors run the steps that any of them has begun, without the dead rank. Then the
epoch pauses, and its rest is divided again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

EVERY_STEP = sys.maxsize


class StepPlace(NamedTuple):
    """Position of a rank in its steps.

    Attributes:
        passes: backward passes of the run whose sums it has.
        first: of the epoch, the first step that no such pass can be of.
        begun: the last step that its loop was given.
    """

    passes: int
    first: int
    begun: int

    @staticmethod
    def at(
        passes: int, step: int, *, is_inside: bool, waits: int | None, passed: int
    ) -> StepPlace:
        """Position of a loop that received a step last (-1: none yet).

        Args:
            passes: whose sums it has.
            step: which it received.
            is_inside: the loop has not asked for the next one.
            waits: an earlier one, or this, whose backward pass is under way or to come.
            passed: the one that the last pass was of.
        """
        if waits is not None:
            return StepPlace(passes, waits, step)
        is_over = passed == step or not is_inside
        return StepPlace(passes, step + is_over, step)


@dataclass(frozen=True, slots=True)
class Settlement:
    """Decision for all survivors.

    Attributes:
        source: place of one that has the sums of the last pass; None where all have.
        passes: whose sums all have then.
        first: from this step on the dead rank's part is missing.
        last: all run steps to this one.
    """

    source: int | None
    passes: int
    first: int
    last: int


def settle(places: Sequence[StepPlace]) -> Settlement:
    """From where each of the survivors is, in their order."""
    passes = [place.passes for place in places]
    most = max(passes)
    return Settlement(
        source=passes.index(most) if min(passes) < most else None,
        passes=most,
        first=max(place.first for place in places),
        last=max(place.begun for place in places),
    )


@final
class LostRanks:
    """Ranks that have died in the part of an epoch under way, as one rank knows.

    Attributes:
        parts: of epochs so far.
        first: the first step without each one's part.
        last: all ranks run steps to this one; `EVERY_STEP` if none has died.
    """

    def __init__(self) -> None:
        self.parts = 0
        self.first: dict[int, int] = {}
        self.last = EVERY_STEP
        self._sure: set[int] = set()

    def begin_part(self) -> None:
        """The epoch, or the next part of it, begins."""
        self.parts += 1
        self.first.clear()
        self._sure.clear()
        self.last = EVERY_STEP

    def take(self, gone: Iterable[int], settlement: Settlement) -> None:
        """All survivors draw this; ``gone`` are all that have died."""
        for rank in set(gone) - self._sure:
            self.first[rank] = settlement.first
        self.last = settlement.last

    def confirm(self) -> None:
        """Confirms the decision; without it another death repeats it."""
        self._sure |= self.first.keys()

    @property
    def is_settled(self) -> bool:
        """True if any has, and the part ends early."""
        return self.last != EVERY_STEP

    def to_wire(self) -> tuple[tuple[int, int], ...]:
        """(rank, its first missing step) of each."""
        return tuple(sorted(self.first.items()))
