"""Throttle: a bound on the batches by which ranks lead the slowest. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Throttle:
    """Counts batches since the last synchronisation and says how far a rank may go.

    A rank may run ``max_batch_diff`` batches more than the slowest one has (one, if
    that is 0: then all run in lockstep), until the next synchronisation: also when the
    slowest has ended its window.

    Args:
        max_batch_diff: the largest lead; None sets no limit.
        ranks: who takes part.
    """

    def __init__(self, max_batch_diff: int | None, ranks: Iterable[int]) -> None:
        self._lead = None if max_batch_diff is None else max(1, max_batch_diff)
        self._done = dict.fromkeys(ranks, 0)
        self._behind = Counter(self._done.values())
        self._stopped: Counter[int] = Counter()
        self._slowest = 0

    @property
    def limit(self) -> int | None:
        """Batches since the last synchronisation that any rank may run now."""
        return None if self._lead is None else self._slowest + self._lead

    @property
    def is_final(self) -> bool:
        """True if the limit can rise no more: the slowest have all stopped."""
        if self._lead is None or not self._behind:
            return False
        return self._stopped[self._slowest] >= self._behind[self._slowest]

    def holds(self, batches: int) -> bool:
        """True if a rank that has run so many waits in vain for the slowest."""
        return self.limit is not None and batches >= self.limit and self.is_final

    def done(self, rank: int, batches: int) -> bool:
        """A rank has run so many; True if the limit has risen."""
        if self._lead is None or rank not in self._done:
            return False
        self._count(self._done[rank], -1)
        self._done[rank] = batches
        self._count(batches, 1)
        return self._follow()

    def stop(self, rank: int) -> None:
        """A rank runs no more batches until the next one."""
        if rank in self._done:
            self._stopped[self._done.pop(rank)] += 1

    def remove(self, rank: int) -> bool:
        """A rank is gone; True if the limit has risen."""
        if self._lead is None or rank not in self._done:
            return False
        self._count(self._done.pop(rank), -1)
        return self._follow()

    def _count(self, batches: int, change: int) -> None:
        self._behind[batches] += change
        if not self._behind[batches]:
            del self._behind[batches]

    def _follow(self) -> bool:
        before = self._slowest
        if self._behind:
            while not self._behind.get(self._slowest):
                self._slowest += 1
        return self._slowest > before
