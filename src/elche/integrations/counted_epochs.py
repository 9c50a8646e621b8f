"""A run's epochs in a loop that counts batches."""

from __future__ import annotations

from collections.abc import Iterator
from operator import length_hint
from typing import Any


class CountedEpochs:
    """Loader of a run for a loop that never requests a batch after the last.

    elche's epoch would otherwise stay open until the next one begins, through
    evaluation. Call `end` after each trained batch.

    Args:
        loader: loader of the loop's framework, for length and attributes.
        batches: iterable of the run's batches.
    """

    def __init__(self, loader: Any, batches: Any) -> None:
        self.loader = loader
        self.batches = batches
        self._epoch: Any = None
        self._left = -1  # batches left; -1 without an open epoch or a known length

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.leave()
        self._left = length_hint(self.batches, -1)  # -1: a stream on one device
        return self

    def __next__(self) -> Any:
        if self._epoch is None:
            self._epoch = iter(self.batches)
        batch = next(self._epoch)
        self._left -= 1
        return batch

    def end(self) -> None:
        """Ends the epoch on all ranks if its last batch is done."""
        if self._left == 0:
            if self._epoch is not None:  # else the epoch has no batches
                next(self._epoch, None)
            self._left = -1

    @property
    def is_under_way(self) -> bool:
        """True while an epoch has not reached its end."""
        return self._left >= 0

    def leave(self) -> None:
        """Ends the epoch, or abandons it if batches are left."""
        self.end()
        self._left = -1
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()
