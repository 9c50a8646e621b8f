"""Throttle: a bound on the batches by which ranks lead the slowest. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Throttle:
    """Counts batches since the last synchronisation and says how far a rank may go.

    A rank may run ``max_batch_diff`` batches more than the slowest one has (one, if
    that is 0: then all run in lockstep), until the next synchronisation: also when the
    slowest has ended its window.

    Args:
        max_batch_diff: the largest lead; None sets no limit.
        ranks: the members.
    """

    def __init__(self, max_batch_diff: int | None, ranks: Iterable[int]) -> None:
        self._lead = None if max_batch_diff is None else max(1, max_batch_diff)
        self._done = dict.fromkeys(ranks, 0)
        self._stopped: set[int] = set()
        self._slowest = 0

    @property
    def limit(self) -> int | None:
        """Batches since the last synchronisation that any rank may run now."""
        return None if self._lead is None else self._slowest + self._lead

    @property
    def is_final(self) -> bool:
        """True if the limit can rise no more: the slowest have all stopped."""
        if self._lead is None or not self._done:
            return False
        late = (r for r, batches in self._done.items() if batches == self._slowest)
        return self._stopped.issuperset(late)

    def holds(self, batches: int) -> bool:
        """True if a rank that has run so many waits in vain for the slowest."""
        return self.limit is not None and batches >= self.limit and self.is_final

    def done(self, rank: int, batches: int) -> bool:
        """A rank has run so many; True if the limit has risen."""
        if self._lead is None or rank in self._stopped:
            return False
        before, self._done[rank] = self._slowest, batches
        self._slowest = min(self._done.values())
        return self._slowest > before

    def stop(self, rank: int) -> None:
        """A rank runs no more batches until the next one."""
        self._stopped.add(rank)

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        self._done.pop(rank, None)
        self._slowest = min(self._done.values(), default=self._slowest)
