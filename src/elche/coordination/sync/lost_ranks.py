"""Steps of ``sync`` after deaths: the steps that lack a dead rank's part. Pure.

Survivors are at most one backward pass apart, since a pass ends when all ranks have
reached it. They exchange their positions in the next group and make the same decision:

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
        passes: number of the run's backward passes whose sums it has.
        first: first step of the epoch to which none of these passes can belong.
        begun: last step that its loop received.
    """

    passes: int
    first: int
    begun: int

    @staticmethod
    def at(
        passes: int, step: int, *, is_inside: bool, waits: int | None, passed: int
    ) -> StepPlace:
        """Returns the position of a loop that received a step last (-1: none yet).

        Args:
            passes: number of passes whose sums it has.
            step: the step that it received last.
            is_inside: the loop has not requested the next step.
            waits: this or an earlier step, if its backward pass is not complete.
            passed: step of the last complete pass.
        """
        if waits is not None:
            return StepPlace(passes, waits, step)
        is_over = passed == step or not is_inside
        return StepPlace(passes, step + is_over, step)


@dataclass(frozen=True, slots=True)
class Settlement:
    """Decision that all survivors make in the same way.

    Attributes:
        source: index of a rank with the sums of the last pass; None if all have them.
        passes: number of passes whose sums all ranks have afterwards.
        first: first step that lacks the dead rank's part.
        last: last step that all ranks run.
    """

    source: int | None
    passes: int
    first: int
    last: int


def settle(places: Sequence[StepPlace]) -> Settlement:
    """Decides from the survivors' positions, in their order."""
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
    """Ranks that died in the current part of an epoch, as seen by one rank.

    Attributes:
        parts: number of epoch parts so far.
        first: by dead rank, the first step without its part.
        last: last step that all ranks run; `EVERY_STEP` if no rank has died.
    """

    def __init__(self) -> None:
        self.parts = 0
        self.first: dict[int, int] = {}
        self.last = EVERY_STEP
        self._sure: set[int] = set()

    def begin_part(self) -> None:
        """Begins the epoch, or the next part of it."""
        self.parts += 1
        self.first.clear()
        self._sure.clear()
        self.last = EVERY_STEP

    def take(self, gone: Iterable[int], settlement: Settlement) -> None:
        """Applies the survivors' decision; ``gone`` are all ranks that have died."""
        for rank in set(gone) - self._sure:
            self.first[rank] = settlement.first
        self.last = settlement.last

    def confirm(self) -> None:
        """Confirms the decision; another death before that repeats it."""
        self._sure |= self.first.keys()

    @property
    def is_settled(self) -> bool:
        """True if a rank has died, so that the part ends early."""
        return self.last != EVERY_STEP

    def to_wire(self) -> tuple[tuple[int, int], ...]:
        """Returns (rank, its first missing step) of each dead rank."""
        return tuple(sorted(self.first.items()))
