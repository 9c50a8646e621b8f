"""Which batch it was that left what a rank has learned no number.

Whether a window's contribution is a number is asked once, at its end: asking after
every batch would wait for the device. Where it is none, any of its batches may be at
fault. They are leased again as *suspects*, and from the first suspect of a window on,
whoever trains on them asks after every batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from elche.coordination.ledger import Range
from elche.runtime.window_sync import WindowSync


class Suspects:
    """Looks for the batch that is at fault, in one epoch.

    Args:
        sync: knows what this rank has learned.
    """

    def __init__(self, sync: WindowSync) -> None:
        self._sync = sync
        self._batches: set[int] = set()
        self._watches = False
        self._since: int | None = None
        self._culprit: int | None = None

    def add(self, ranges: Iterable[Range]) -> None:
        """Batches that are leased with the word that they are suspect."""
        for start, stop in ranges:
            self._batches.update(range(start, stop))

    def begin(self, batch: int) -> None:
        """A loop body begins on this batch."""
        if batch in self._batches and not self._watches and self._culprit is None:
            # What the window's earlier batches broke is no suspect's fault.
            self._watches = self._sync.is_finite

    def done(self, batch: int) -> None:
        """The loop body has run.

        A gradient may wait in ``p.grad`` for the loop's next step: then the batch that
        left it there is at fault, not the one with the step.
        """
        if not self._watches:
            return
        if not self._sync.is_finite:
            self._culprit = batch if self._since is None else self._since
            self._watches = False
        elif self._sync.has_finite_gradients:
            self._since = None
        elif self._since is None:
            self._since = batch

    def window_ends(self) -> int | None:
        """The batch at fault, if one was found in the window; forgets it."""
        culprit, self._culprit = self._culprit, None
        self._watches, self._since = False, None
        return culprit
