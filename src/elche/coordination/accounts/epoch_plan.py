"""Plans of windows made from settings alone: what ``deterministic=True`` runs.

A window's plan says which batches each rank trains on in it, and after how many batches
of it the result of the window before is adopted. Under a plan nothing depends on time,
so two runs on the same devices give the same bits. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from elche.coordination.accounts.batch_ranges import BatchSizes, Range


@dataclass(slots=True, kw_only=True)
class WindowPlan:
    """One window; lists have an entry per rank.

    Attributes:
        parts: batches, as ranges in the order of training.
        adopt_at: batches of this window before which the last result is adopted.
        committed_samples: what a scheduler follows, as `OpenWindow` has it.
        planned_samples: likewise.
        planned_batches: likewise, per rank.
    """

    parts: list[list[Range]]
    adopt_at: list[int]
    committed_samples: int = 0
    planned_samples: int = 0
    planned_batches: list[int] = field(default_factory=list)

    def batches(self, rank: int) -> int:
        """Batches of a rank."""
        return sum(stop - start for start, stop in self.parts[rank])


@final
class FixedWindows:
    """Windows of fixed counts.

    Args:
        sizes: the epoch's batches.
        counts: batches per rank and window.
        committed_samples: of the run before this epoch.
    """

    def __init__(
        self, sizes: BatchSizes, counts: Sequence[int], committed_samples: int
    ) -> None:
        self._sizes = sizes
        self._counts = list(counts)
        self._committed_samples = committed_samples

    def window(self, number: int) -> WindowPlan | None:
        """Window ``number``, of the same counts as all; None past the epoch's end."""
        total, end = sum(self._counts), self._sizes.num_batches
        first = number * total
        if first >= end:
            return None
        parts: list[list[Range]] = []
        at = first
        for count in self._counts:
            stop = min(end, at + count)
            parts.append([(at, stop)] if stop > at else [])
            at = stop
        counts = [sum(b - a for a, b in part) for part in parts]
        return WindowPlan(
            parts=parts,
            adopt_at=[min(1, count) for count in counts],
            committed_samples=self._committed_samples
            + self._sizes.samples_in(0, first),
            planned_samples=self._sizes.samples_in(first, at),
            planned_batches=counts,
        )


@final
class WindowPlans:
    """Plans of the windows of one epoch, by the numbers that they have in the run.

    Args:
        first_window: the number of its first window.

    Attributes:
        unleased: the first window whose batches have not been leased by a plan.
    """

    def __init__(self, first_window: int) -> None:
        self._first_window = self.unleased = first_window
        self._source: FixedWindows | None = None

    @property
    def is_followed(self) -> bool:
        """Whether windows are planned, and so depend on no measurement."""
        return self._source is not None

    def follow(self, source: FixedWindows) -> None:
        """Plans the windows of this epoch."""
        self._source = source

    def window(self, window: int) -> WindowPlan | None:
        """The plan of a window; None past the end, or where none is followed."""
        if self._source is None:
            return None
        return self._source.window(window - self._first_window)

    def lease_next(self) -> WindowPlan | None:
        """The next window whose batches are to be leased; None past the end."""
        plan = self.window(self.unleased)
        self.unleased += plan is not None
        return plan
