"""Length of a run, as far as it is known. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from elche.coordination.accounts.batch_ranges import BatchSizes

USUAL_EPOCHS = 10
"""Assumed number of epochs when ``epochs=`` is not given."""


@final
@dataclass(slots=True)
class RunLength:
    """Batches of a whole run, if epochs stay as long as the one under way.

    Args:
        given_epochs: value of ``epochs=``, if it was given.
        begun_epochs: epochs that have begun.
        epoch_batches: batches of the one under way.
    """

    given_epochs: int | None
    begun_epochs: int = 0
    epoch_batches: int = 0

    def begin_epoch(self, epoch: int, sizes: BatchSizes) -> None:
        """An epoch begins, or the rest of one, which changes nothing."""
        if epoch + 1 != self.begun_epochs:
            self.begun_epochs, self.epoch_batches = epoch + 1, sizes.num_batches

    @property
    def epochs(self) -> int:
        """The given number while it holds; or as many again as have begun."""
        if self.given_epochs is not None and self.given_epochs >= self.begun_epochs:
            return self.given_epochs
        return max(USUAL_EPOCHS, 2 * self.begun_epochs)

    @property
    def batches(self) -> int:
        """Global batches of all epochs."""
        return self.epochs * self.epoch_batches

    def __str__(self) -> str:
        text = f"in a run of {self.batches} batches"
        if self.given_epochs is None:
            text += f", assuming {self.epochs} epochs (set epochs= to change it)"
        return text
