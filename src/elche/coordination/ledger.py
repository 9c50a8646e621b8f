"""Which batch of an epoch is where: pooled, leased, trained, staged, committed.

A batch is a range of *positions* of the epoch's permutation; the ledger keeps the
account in batches, in which leases are granted, and counts samples by their sizes.
Every batch is in exactly one place at any time (:meth:`EpochLedger.check`), and it
leaves the pool for the model exactly once. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from elche.errors import ProtocolError, TransitionError

Range = tuple[int, int]
"""Batches ``start <= batch < stop``."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes of an epoch, as runs of (samples, number of batches)."""

    runs: tuple[Range, ...]
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ends = tuple(accumulate(count for _, count in self.runs))
        object.__setattr__(self, "_ends", ends)
        if any(samples < 1 or count < 1 for samples, count in self.runs):
            raise ProtocolError(f"expected runs of at least 1 sample, got {self.runs}")

    @staticmethod
    def of(sizes: Sequence[int]) -> BatchSizes:
        """Run-length encodes the sizes of consecutive batches."""
        runs: list[Range] = []
        for samples in sizes:
            if runs and runs[-1][0] == samples:
                runs[-1] = (samples, runs[-1][1] + 1)
            else:
                runs.append((samples, 1))
        return BatchSizes(tuple(runs))

    @property
    def num_batches(self) -> int:
        """Batches of the epoch."""
        return sum(count for _, count in self.runs)

    @property
    def num_samples(self) -> int:
        """Samples (positions) of the epoch."""
        return sum(samples * count for samples, count in self.runs)

    def run_of(self, batch: int) -> tuple[int, int]:
        """Size of a batch, and the first batch after its run of equal sizes."""
        run = bisect_right(self._ends, batch)
        if batch < 0 or run == len(self._ends):
            raise ProtocolError(f"batch {batch} is outside 0..{self.num_batches - 1}")
        return self.runs[run][0], self._ends[run]

    def samples_in(self, start: int, stop: int) -> int:
        """Samples of the batches ``start <= batch < stop``."""
        total = 0
        while start < stop:
            samples, end = self.run_of(start)
            total += samples * (min(end, stop) - start)
            start = min(end, stop)
        return total


class EpochLedger:
    """The account of one epoch.

    Args:
        sizes: the epoch's batch sizes.
        holders: who may hold leases: ranks, or one common holder under ``sync``.
    """

    def __init__(self, sizes: BatchSizes, holders: Sequence[int]) -> None:
        self.sizes = sizes
        self._pool: deque[Range] = deque()
        if sizes.num_batches:
            self._pool.append((0, sizes.num_batches))
        self._leased: dict[int, deque[Range]] = {holder: deque() for holder in holders}
        self._trained: dict[int, list[Range]] = {holder: [] for holder in holders}
        self._staged: list[Range] = []
        self._committed: list[Range] = []
        self._committed_samples = 0
        self._abandoned: list[Range] = []

    @property
    def pooled(self) -> int:
        """Batches that nobody holds."""
        return _count(self._pool)

    @property
    def committed_samples(self) -> int:
        """Samples whose contribution is in the model that all ranks hold."""
        return self._committed_samples

    @property
    def is_done(self) -> bool:
        """True when nothing is pooled, leased or waiting for a commit."""
        held = any(self._leased.values()) or any(self._trained.values())
        return not (self._pool or held or self._staged)

    def leased(self, holder: int) -> int:
        """Batches leased to a holder and not yet trained on."""
        return _count(self._leased[holder])

    def trained(self, holder: int) -> int:
        """Batches that a holder has trained on since the last commit."""
        return _count(self._trained[holder])

    def trained_samples(self, holder: int) -> int:
        """Samples that a holder has trained on since the last commit."""
        return sum(self.sizes.samples_in(*part) for part in self._trained[holder])

    def lease(self, holder: int, most: int, *, equal_sizes: bool = False) -> Range:
        """Moves up to ``most`` consecutive batches from the pool to a holder.

        Args:
            holder: who gets them.
            most: at most so many batches (at least 1).
            equal_sizes: end the lease where the batch size changes.

        Raises:
            TransitionError: the pool is empty.
        """
        if not self._pool or most < 1:
            raise TransitionError(f"nothing to lease to {holder} (asked for {most})")
        start, stop = self._pool.popleft()
        end = min(stop, start + most)
        if equal_sizes:
            end = min(end, self.sizes.run_of(start)[1])
        if end < stop:
            self._pool.appendleft((end, stop))
        _append(self._leased[holder], (start, end))
        return start, end

    def train(self, holder: int, start: int, stop: int) -> None:
        """Moves the next leased batches of a holder to trained.

        Raises:
            ProtocolError: they are not the next ones that it was given.
        """
        leases = self._leased.get(holder)
        if not leases or leases[0][0] != start or not start < stop <= leases[0][1]:
            given = list(leases or ())
            raise ProtocolError(
                f"{holder} claims batches {start}..{stop - 1}, but its next leases "
                f"are {given}"
            )
        _, end = leases.popleft()
        if stop < end:
            leases.appendleft((stop, end))
        _append(self._trained[holder], (start, stop))

    def stage(self) -> int:
        """Moves what all holders have trained on into the reduction under way.

        Returns:
            Its samples.

        Raises:
            TransitionError: the reduction before has not been committed.
        """
        if self._staged:
            raise TransitionError("a reduction begins before the last was committed")
        for trained in self._trained.values():
            self._staged.extend(trained)
            trained.clear()
        return sum(self.sizes.samples_in(*part) for part in self._staged)

    def commit(self) -> int:
        """Moves what was staged to committed; returns its samples."""
        samples = sum(self.sizes.samples_in(*part) for part in self._staged)
        self._committed_samples += samples
        self._committed.extend(self._staged)
        self._staged.clear()
        return samples

    def give_back(self, holder: int) -> int:
        """Returns leases not trained on to the pool; returns how many batches."""
        count = self.leased(holder)
        self._pool.extendleft(reversed(self._leased[holder]))
        self._leased[holder].clear()
        return count

    def abandon(self) -> int:
        """Takes what is pooled out of the epoch (the loop ended early)."""
        count = self.pooled
        self._abandoned.extend(self._pool)
        self._pool.clear()
        return count

    def check(self) -> None:
        """Asserts that every batch is in exactly one place."""
        places = [*self._pool, *self._staged, *self._committed, *self._abandoned]
        for part in (*self._leased.values(), *self._trained.values()):
            places.extend(part)
        at = 0
        for start, stop in sorted(places):
            assert start == at, f"batch {at}: expected once, in {sorted(places)}"
            assert stop > start, f"an empty range in {sorted(places)}"
            at = stop
        assert at == self.sizes.num_batches, (
            f"batches {at}..{self.sizes.num_batches - 1} are nowhere"
        )


def _count(ranges: Sequence[Range] | deque[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _append(ranges: deque[Range] | list[Range], part: Range) -> None:
    """Appends a range, joined to the last one where they touch."""
    if ranges and ranges[-1][1] == part[0]:
        ranges[-1] = (ranges[-1][0], part[1])
    else:
        ranges.append(part)
