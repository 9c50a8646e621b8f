"""Plans of windows made from settings alone: what ``deterministic=True`` runs.

A window's plan says which batches each rank trains on in it, and after how many batches
of it the result of the window before is adopted. Under a plan nothing depends on time,
so two runs on the same devices give the same bits. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from elche.coordination.accounts.batch_ranges import BatchSizes, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """One window; tuples have an entry per rank.

    Attributes:
        parts: batches, of which a rank may have none.
        committed_samples: what a scheduler follows, as `OpenWindow` has it.
        planned_samples: likewise.
    """

    parts: tuple[Range, ...]
    committed_samples: int
    planned_samples: int

    def batches(self, place: int) -> int:
        """Batches of the rank at this place."""
        start, stop = self.parts[place]
        return stop - start


@final
class FixedWindows:
    """Windows of the same counts each, through one epoch.

    Args:
        sizes: the epoch's batches.
        counts: batches per rank and window.
        committed_samples: of the run before this epoch.
        first_window: number of the epoch's first window in the run.

    Attributes:
        unleased: the first window whose batches have not been leased.
    """

    def __init__(
        self,
        sizes: BatchSizes,
        counts: Sequence[int],
        committed_samples: int,
        first_window: int,
    ) -> None:
        self._sizes = sizes
        self._counts = list(counts)
        self._committed_samples = committed_samples
        self._first_window = self.unleased = first_window

    def window(self, number: int) -> WindowPlan:
        """The plan of a window; past the epoch's end nobody has a batch."""
        end = self._sizes.num_batches
        first = min(end, (number - self._first_window) * sum(self._counts))
        bounds = [min(end, at) for at in accumulate(self._counts, initial=first)]
        done = self._sizes.samples_in(0, first)
        return WindowPlan(
            parts=tuple(pairwise(bounds)),
            committed_samples=self._committed_samples + done,
            planned_samples=self._sizes.samples_in(first, bounds[-1]),
        )

    def lease_next(self) -> WindowPlan | None:
        """The next window whose batches are to be leased; None past the end."""
        plan = self.window(self.unleased)
        if not any(stop > start for start, stop in plan.parts):
            return None
        self.unleased += 1
        return plan
