"""Ledger of an epoch's batches: pooled, leased, trained, staged, committed.

A batch is a range of *positions* of the epoch's permutation; the ledger keeps the
account in batches, in which leases are granted, and counts samples by their sizes.
Every batch is in exactly one place at any time (:meth:`EpochLedger.check`), and it
leaves the pool for good exactly once. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
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
    """Batches of one holder: leased, trained, and offered to a window.

    The last three with their samples, so that these are counted once.
    """

    leased: deque[Range] = field(default_factory=deque)
    trained: list[Range] = field(default_factory=list)
    closed: list[Range] = field(default_factory=list)
    staged: list[Range] = field(default_factory=list)
    leased_count: int = 0
    trained_samples: int = 0
    closed_samples: int = 0
    staged_samples: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.leased or self.trained or self.closed or self.staged)


class EpochLedger:
    """The account of one epoch.

    A batch goes from the pool to a *lease*, is *trained*, *closed* with its window,
    *staged* while that is reduced, and *committed*; or *discarded*, where its window
    closes with an update that is not finite. Whatever a lost holder had short of that
    returns to the pool. Granting, training and counting cost the same however many
    holders there are.

    Args:
        sizes: the epoch's batch sizes.
        holders: who may hold leases: ranks, or one common holder under ``sync``.
    """

    def __init__(self, sizes: BatchSizes, holders: Iterable[int]) -> None:
        self.sizes = sizes
        self._pool: deque[Range] = deque()
        if sizes.num_batches:
            self._pool.append((0, sizes.num_batches))
        self._pooled = sizes.num_batches
        self._leased = 0
        self._holdings = {holder: _Holding() for holder in holders}
        self._committed: list[Range] = []
        self._committed_samples = 0
        self._left_out: list[Range] = []
        self._abandoned: list[Range] = []
        self._gone: set[int] = set()

    @property
    def pooled(self) -> int:
        """Batches that no rank holds."""
        return self._pooled

    @property
    def total_leased(self) -> int:
        """Batches leased to anybody and not yet trained on."""
        return self._leased

    @property
    def committed_samples(self) -> int:
        """Samples whose contribution is in the model that all ranks hold."""
        return self._committed_samples

    @property
    def staged_samples(self) -> int:
        """Samples in the reduction under way."""
        return sum(holding.staged_samples for holding in self._holdings.values())

    @property
    def used_samples(self) -> int:
        """Samples that were trained on, and are committed or wait for it."""
        return self._committed_samples + sum(
            holding.trained_samples + holding.closed_samples + holding.staged_samples
            for holding in self._holdings.values()
        )

    @property
    def is_done(self) -> bool:
        """True when nothing is pooled, leased or waiting for a commit."""
        empty = all(holding.is_empty for holding in self._holdings.values())
        return not self._pool and empty

    def leased(self, holder: int) -> int:
        """Batches leased to a holder and not yet trained on."""
        return self._holdings[holder].leased_count

    def trained(self, holder: int) -> int:
        """Batches that a holder has trained on since it last closed a window."""
        return count_batches(self._holdings[holder].trained)

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
        self._granted(holder, (start, end))
        return start, end

    def lease_range(self, holder: int, start: int, stop: int) -> None:
        """Moves the batches ``start <= batch < stop`` from the pool to a holder.

        Raises:
            TransitionError: they are not all in the pool.
        """
        self._take(start, stop)
        self._granted(holder, (start, stop))

    def pooled_ranges(self) -> tuple[Range, ...]:
        """Ranges that no rank holds."""
        return tuple(self._pool)

    def _take(self, start: int, stop: int) -> None:
        """Takes batches out of the middle of the pool; counts stay as they were."""
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
        count = part[1] - part[0]
        holding = self._holdings[holder]
        append_range(holding.leased, part)
        holding.leased_count += count
        self._pooled -= count
        self._leased += count

    def train(self, holder: int, start: int, stop: int) -> int:
        """Moves the next leased batches of a holder to trained; returns their samples.

        Raises:
            ProtocolError: they are not the next ones that it was given.
        """
        holding = self._holdings.get(holder)
        leases = holding.leased if holding is not None else deque()
        if not leases or leases[0][0] != start or not start < stop <= leases[0][1]:
            raise ProtocolError(
                f"{holder} claims batches {start}..{stop - 1}, but its next leases "
                f"are {list(leases)[:4]}"
            )
        assert holding is not None
        _, end = leases.popleft()
        if stop < end:
            leases.appendleft((stop, end))
        holding.leased_count -= stop - start
        self._leased -= stop - start
        append_range(holding.trained, (start, stop))
        samples = self.sizes.samples_in(start, stop)
        holding.trained_samples += samples
        return samples

    def close(self, holder: int) -> None:
        """Assigns a holder's trained batches to the window that it ends now."""
        holding = self._holdings[holder]
        holding.closed.extend(holding.trained)
        holding.trained.clear()
        holding.closed_samples += holding.trained_samples
        holding.trained_samples = 0

    def stage(self) -> int:
        """Puts everything closed into the reduction that begins; returns its samples.

        Raises:
            TransitionError: the last reduction has not been committed.
        """
        if any(holding.staged for holding in self._holdings.values()):
            raise TransitionError("a reduction begins before the last was committed")
        for holding in self._holdings.values():
            holding.staged, holding.closed = holding.closed, holding.staged
            holding.staged_samples, holding.closed_samples = holding.closed_samples, 0
        return self.staged_samples

    def commit(self) -> int:
        """Moves what was staged to committed; returns its samples."""
        samples = self.staged_samples
        self._committed_samples += samples
        parts = self._committed
        for holding in self._holdings.values():
            parts.extend(holding.staged)
            holding.staged.clear()
            holding.staged_samples = 0
        self._committed = joined(parts)
        for holder in self._gone:
            del self._holdings[holder]
        self._gone.clear()
        return samples

    def unstage_gone(self) -> dict[int, int]:
        """A reduction is redone without those who are gone: their part is pooled.

        What others have closed meanwhile waits for the next one.

        Returns:
            The samples that are pooled again, by who had them.
        """
        samples: dict[int, int] = {}
        for holder in self._gone:
            holding = self._holdings.pop(holder)
            samples[holder] = holding.staged_samples
            self._return(holding.staged)
        self._gone.clear()
        return samples

    def give_back(self, holder: int) -> int:
        """Returns leases not trained on to the pool; returns how many batches."""
        holding = self._holdings[holder]
        count = holding.leased_count
        self._return(list(holding.leased))
        holding.leased.clear()
        holding.leased_count = 0
        self._leased -= count
        return count

    def discard(self, holder: int) -> tuple[Range, ...]:
        """Drops a holder's closed batches: done, and in no model. Returns them."""
        holding = self._holdings[holder]
        gone, holding.closed = tuple(holding.closed), []
        holding.closed_samples = 0
        self._left_out.extend(gone)
        return gone

    def remove(self, holder: int) -> None:
        """A holder is gone: what it had returns to the pool.

        But for its part of a reduction under way, which is decided by :meth:`commit`
        or :meth:`unstage_gone`.
        """
        self.give_back(holder)
        holding = self._holdings[holder]
        self._return([*holding.trained, *holding.closed])
        holding.trained, holding.closed = [], []
        holding.trained_samples = holding.closed_samples = 0
        if holding.is_empty:
            del self._holdings[holder]
        else:
            self._gone.add(holder)

    def positions_left(self) -> tuple[Range, ...]:
        """Positions that are pooled, or were when the epoch was abandoned."""
        return tuple(
            (self.sizes.position_of(start), self.sizes.position_of(stop))
            for start, stop in joined([*self._abandoned, *self._pool])
        )

    def abandon(self) -> int:
        """Takes what is pooled out of the epoch (the loop ended early)."""
        count = self._pooled
        self._left_out.extend(self._pool)
        self._abandoned.extend(self._pool)
        self._pool.clear()
        self._pooled = 0
        return count

    def check(self) -> None:
        """Asserts that every batch is in exactly one place, and the counts."""
        places = [*self._pool, *self._committed, *self._left_out]
        leased = 0
        for holding in self._holdings.values():
            assert count_batches(holding.leased) == holding.leased_count
            leased += holding.leased_count
            for part in (
                holding.leased,
                holding.trained,
                holding.closed,
                holding.staged,
            ):
                places.extend(part)
            assert holding.trained_samples == self._samples_in(holding.trained)
            assert holding.closed_samples == self._samples_in(holding.closed)
            assert holding.staged_samples == self._samples_in(holding.staged)
        assert leased == self._leased, (leased, self._leased)
        assert count_batches(self._pool) == self._pooled
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

    def _return(self, parts: Sequence[Range]) -> None:
        """Puts batches back into the pool, in order, ranges that touch joined."""
        pooled = sorted([*parts, *self._pool])
        self._pool.clear()
        for part in pooled:
            append_range(self._pool, part)
        self._pooled += count_batches(parts)
