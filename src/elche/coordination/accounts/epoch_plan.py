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
    """One window.

    Attributes:
        parts: batches by rank, of which a rank may have none.
        committed_samples: what a scheduler follows, as `OpenWindow` has it.
        planned_samples: likewise.
    """

    parts: dict[int, Range]
    committed_samples: int
    planned_samples: int

    def batches(self, rank: int) -> int:
        """Batches of a rank."""
        start, stop = self.parts[rank]
        return stop - start


@final
@dataclass(slots=True)
class FixedWindows:
    """Windows of the same counts each, through one epoch.

    Attributes:
        sizes: the epoch's batches.
        ranks: the members, in order.
        counts: batches per rank and window.
        committed_samples: of the run before this epoch.
        first_window: number of the epoch's first window in the run.
        leased: windows whose batches have been leased.
    """

    sizes: BatchSizes
    ranks: Sequence[int]
    counts: Sequence[int]
    committed_samples: int
    first_window: int
    leased: int = 0

    def window(self, number: int) -> WindowPlan:
        """The plan of a window; past the epoch's end no rank has a batch."""
        end = self.sizes.num_batches
        first = min(end, (number - self.first_window) * sum(self.counts))
        bounds = [min(end, at) for at in accumulate(self.counts, initial=first)]
        return WindowPlan(
            parts=dict(zip(self.ranks, pairwise(bounds), strict=True)),
            committed_samples=self.committed_samples + self.sizes.samples_in(0, first),
            planned_samples=self.sizes.samples_in(first, bounds[-1]),
        )

    def lease_next(self) -> WindowPlan | None:
        """The next window whose batches are to be leased; None past the end."""
        plan = self.window(self.unleased)
        if not plan.planned_samples:
            return None
        self.leased += 1
        return plan

    @property
    def unleased(self) -> int:
        """The first window whose batches have not been leased."""
        return self.first_window + self.leased
