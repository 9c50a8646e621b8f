"""Ledger of an epoch's batches: pooled, leased, trained, staged, committed.

A batch is a range of *positions* of the epoch's permutation. Leases are granted and
accounted in batches; samples follow from the batch sizes. Every batch is in exactly one
place at any time (:meth:`EpochLedger.check`), and leaves the pool for good exactly
once. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from elche.coordination.accounts.batch_ranges import (
    BatchSizes,
    Range,
    append_range,
    count_batches,
    joined,
)
from elche.errors import ProtocolError, TransitionError


@dataclass(slots=True)
class _Holding:
    """One holder's batches: leased, trained, closed with a window, and staged."""

    leased: deque[Range] = field(default_factory=deque)
    trained: list[Range] = field(default_factory=list)
    closed: list[Range] = field(default_factory=list)
    staged: list[Range] = field(default_factory=list)

    @property
    def all(self) -> list[Range]:
        return [*self.leased, *self.trained, *self.closed, *self.staged]


class EpochLedger:
    """Account of one epoch's batches.

    A batch moves from the pool to a *lease*, is *trained*, *closed* with its window,
    *staged* during the reduction, and *committed*. It is *discarded* if its window's
    update is not finite. A lost holder's batches return to the pool unless they are
    committed or discarded. A grant costs the same for any number of holders.

    Args:
        sizes: the epoch's batch sizes.
        holders: ranks, which may hold leases.

    Attributes:
        pooled: batches that no rank holds.
        total_leased: batches leased to all holders and not trained on yet.
    """

    def __init__(self, sizes: BatchSizes, holders: Iterable[int]) -> None:
        self.sizes = sizes
        self.pooled = sizes.num_batches
        self.total_leased = 0
        self._pool = deque([(0, self.pooled)] if self.pooled else [])
        self._holdings = {holder: _Holding() for holder in holders}
        self._committed: list[Range] = []
        self._untrained: list[Range] = []
        self._abandoned: list[Range] = []
        self._gone: set[int] = set()

    @property
    def used_samples(self) -> int:
        """Samples that were trained on: committed, or waiting for a commit."""
        held = self._holdings.values()
        waiting = [[*h.trained, *h.closed, *h.staged] for h in held]
        return sum(map(self._samples_in, [self._committed, *waiting]))

    def leased(self, holder: int) -> int:
        """Returns the number of batches leased to a holder and not trained on yet."""
        return count_batches(self._holdings[holder].leased)

    def trained(self, holder: int) -> int:
        """Returns the number of batches trained by a holder since its last close."""
        return count_batches(self._holdings[holder].trained)

    def lease(self, holder: int, most: int) -> Range:
        """Moves up to ``most`` consecutive batches from the pool to a holder.

        Raises:
            TransitionError: the pool is empty.
        """
        if not self._pool or most < 1:
            raise TransitionError(f"nothing to lease to {holder} (asked for {most})")
        start, stop = self._pool.popleft()
        end = min(stop, start + most)
        if end < stop:
            self._pool.appendleft((end, stop))
        self._granted(holder, (start, end))
        return start, end

    def lease_range(self, holder: int, start: int, stop: int) -> None:
        """Moves the batches ``start <= batch < stop`` from the pool to a holder.

        Raises:
            TransitionError: some batches are not in the pool.
        """
        self._take(start, stop)
        self._granted(holder, (start, stop))

    def _take(self, start: int, stop: int) -> None:
        for at, (begin, end) in enumerate(self._pool):
            if begin <= start < stop <= end:
                rest = [(begin, start), (stop, end)]
                del self._pool[at]
                for part in reversed([part for part in rest if part[0] < part[1]]):
                    self._pool.insert(at, part)
                return
        raise TransitionError(
            f"batches {start}..{stop - 1} are planned, but not in the pool"
        )

    def _granted(self, holder: int, part: Range) -> None:
        append_range(self._holdings[holder].leased, part)
        self.pooled -= part[1] - part[0]
        self.total_leased += part[1] - part[0]

    def train(self, holder: int, start: int, stop: int) -> int:
        """Moves a holder's next leased batches to trained; returns their samples.

        Raises:
            ProtocolError: the batches are not the holder's next leased ones.
        """
        holding = self._holdings.get(holder) or _Holding()
        leases = holding.leased
        if not leases or leases[0][0] != start or not start < stop <= leases[0][1]:
            raise ProtocolError(
                f"{holder} claims batches {start}..{stop - 1}, but its next leases "
                f"are {list(leases)[:4]}"
            )
        _, end = leases.popleft()
        if stop < end:
            leases.appendleft((stop, end))
        self.total_leased -= stop - start
        append_range(holding.trained, (start, stop))
        return self.sizes.samples_in(start, stop)

    def close(self, holder: int) -> None:
        """Assigns a holder's trained batches to the window that closes now."""
        holding = self._holdings[holder]
        holding.closed.extend(holding.trained)
        holding.trained.clear()

    def stage(self) -> int:
        """Moves all closed batches into the reduction that now begins.

        Returns their samples.

        Raises:
            TransitionError: the last reduction has not been committed.
        """
        if any(holding.staged for holding in self._holdings.values()):
            raise TransitionError("a reduction begins before the last was committed")
        for holding in self._holdings.values():
            holding.staged, holding.closed = holding.closed, holding.staged
        return sum(self._samples_in(h.staged) for h in self._holdings.values())

    def commit(self) -> None:
        """Moves staged batches to committed."""
        for holding in self._holdings.values():
            self._committed += holding.staged
            holding.staged.clear()
        self._committed = joined(self._committed)
        for holder in self._gone:
            del self._holdings[holder]
        self._gone.clear()

    def unstage_gone(self) -> dict[int, int]:
        """Returns lost ranks' batches to the pool, since the reduction is repeated.

        Batches that other ranks have closed meanwhile wait for the next reduction.

        Returns:
            The samples that return to the pool, by lost rank.
        """
        samples: dict[int, int] = {}
        for holder in self._gone:
            staged = self._holdings.pop(holder).staged
            samples[holder] = self._samples_in(staged)
            self._return(staged)
        self._gone.clear()
        return samples

    def give_back(self, holder: int) -> int:
        """Returns a holder's untrained leases to the pool; returns their number."""
        leased, count = self._holdings[holder].leased, self.leased(holder)
        self._return(leased)
        leased.clear()
        self.total_leased -= count
        return count

    def discard(self, holder: int) -> None:
        """Drops a holder's closed batches: they count as done, but are in no model."""
        self._untrained += self._holdings[holder].closed
        self._holdings[holder].closed = []

    def remove(self, holder: int) -> None:
        """Removes a lost holder and returns its batches to the pool.

        Its part of a reduction in flight stays until :meth:`commit` or
        :meth:`unstage_gone`.
        """
        self.give_back(holder)
        holding = self._holdings[holder]
        self._return([*holding.trained, *holding.closed])
        holding.trained, holding.closed = [], []
        if holding.staged:
            self._gone.add(holder)
        else:
            del self._holdings[holder]

    def positions_left(self) -> tuple[Range, ...]:
        """Returns pooled positions, and those in the pool when the loop ended early."""
        return tuple(
            (self.sizes.position_of(start), self.sizes.position_of(stop))
            for start, stop in joined([*self._abandoned, *self._pool])
        )

    def abandon(self) -> int:
        """Empties the pool as the loop ended early; returns the number of batches."""
        count, self.pooled = self.pooled, 0
        self._untrained += self._pool
        self._abandoned += self._pool
        self._pool.clear()
        return count

    def check(self) -> None:
        """Asserts that every batch is in exactly one place, and checks the counts."""
        places = [*self._pool, *self._committed, *self._untrained]
        for holding in self._holdings.values():
            places += holding.all
        assert sum(map(self.leased, self._holdings)) == self.total_leased
        assert count_batches(self._pool) == self.pooled
        at = 0
        for start, stop in sorted(places):
            assert start == at, f"batch {at}: expected once, in {sorted(places)}"
            assert stop > start, f"an empty range in {sorted(places)}"
            at = stop
        assert at == self.sizes.num_batches, (
            f"batches {at}..{self.sizes.num_batches - 1} are nowhere"
        )

    def _samples_in(self, parts: Iterable[Range]) -> int:
        return sum(self.sizes.samples_in(*part) for part in parts)

    def _return(self, parts: Iterable[Range]) -> None:
        """Returns batches to the pool, in order, adjacent ranges merged."""
        self.pooled += count_batches(parts)
        self._pool = deque(joined([*parts, *self._pool]))
