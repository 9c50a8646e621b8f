"""Count of a run's steps: global batches, however ranks divide them. Pure."""

from __future__ import annotations

import math
from typing import final

from elche.coordination.accounts.batch_ranges import BatchSizes

ROUNDING = 1e-6
"""Tolerance (steps): a smaller remainder is rounding, and counts as none."""


@final
class StepCount:
    """Number of the run's steps so far, the same on every rank.

    A step is a global batch of the user's loader, including a short one at an epoch's
    end. After a whole epoch the count is that of a single process. Within an epoch, or
    after an early exit, it follows the trained samples, with fractions.

    Attributes:
        before: steps of earlier epochs, including those before a resume.
        taken: batches that this rank's loop has taken.
        has_left: whether this rank's loop has left its last epoch early.
    """

    def __init__(self) -> None:
        self.before = 0.0
        self.taken = 0
        self.has_left = False
        self._sizes = BatchSizes(())

    def begin_epoch(self, sizes: BatchSizes) -> None:
        """Starts an epoch of these global batches."""
        self._sizes = sizes
        self.has_left = False

    @property
    def of_epoch(self) -> int:
        """Steps of the current epoch, as a single process takes them."""
        return round(self._sizes.batches_in(math.inf))

    def at(self, samples: float) -> float:
        """Returns the run's steps when this many samples of the epoch are trained."""
        return self.before + self._sizes.batches_in(samples)

    def end_epoch(self, samples: int, *, is_early: bool) -> None:
        """Closes the epoch; if not early, all of it was trained or discarded."""
        self.before = self.at(samples if is_early else math.inf)
        self._sizes = BatchSizes(())

    def left(self, steps: int) -> int:
        """Returns the steps that are left of a run of ``steps``."""
        return max(0, math.ceil(steps - self.before - ROUNDING))
