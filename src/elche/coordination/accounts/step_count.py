"""Count of a run's steps: global batches, however ranks divide them. Pure."""

from __future__ import annotations

import math
from typing import final

from elche.coordination.accounts.batch_ranges import BatchSizes

ROUNDING = 1e-6
"""Parts of a step: what is left of one by rounding is none."""


@final
class StepCount:
    """Steps of the run so far, the same on every rank.

    A step is a global batch of the user's loader, also a short one at an epoch's end:
    after an epoch they are those of a single process. Within one, and after one that
    was left early, they follow the samples that are trained; parts of a step count.

    Attributes:
        before: steps of the epochs that have ended, and of a run that was resumed.
        taken: batches of its own that this rank's loop has taken.
        has_left: whether this rank's loop has left its last epoch early.
    """

    def __init__(self) -> None:
        self.before = 0.0
        self.taken = 0
        self.has_left = False
        self._sizes = BatchSizes(())

    def begin_epoch(self, sizes: BatchSizes) -> None:
        """An epoch of these global batches begins."""
        self._sizes = sizes
        self.has_left = False

    @property
    def of_epoch(self) -> int:
        """Steps of the epoch under way, as a single process takes them."""
        return round(self._sizes.batches_in(math.inf))

    def at(self, samples: float) -> float:
        """Steps of the run when so many samples of the epoch are trained."""
        return self.before + self._sizes.batches_in(samples)

    def end_epoch(self, samples: int, *, is_early: bool) -> None:
        """The epoch has ended, early or when all of it was trained or discarded."""
        self.before = self.at(samples if is_early else math.inf)
        self._sizes = BatchSizes(())

    def left(self, steps: int) -> int:
        """Steps that are still to be taken of so many of the whole run."""
        return max(0, math.ceil(steps - self.before - ROUNDING))
