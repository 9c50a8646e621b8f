"""Epochs cut into parts: positions that are left, and their batches. Pure.

A cut epoch continues in the core as a new one over the untrained positions. The rest
of a split global batch becomes a smaller batch of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise, repeat

from elche.coordination.accounts.batch_ranges import BatchSizes, Range, joined
from elche.coordination.protocol.instructions import EndEpoch


@dataclass(frozen=True, slots=True)
class PartRanges:
    """Positions of one part of an epoch, as ascending ranges."""

    ranges: tuple[Range, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = (stop - start for start, stop in self.ranges)
        object.__setattr__(self, "_starts", tuple(accumulate(lengths, initial=0)))

    @property
    def num_positions(self) -> int:
        """Positions of the part."""
        return self._starts[-1]

    def origins_of(self, left: Sequence[Range]) -> PartRanges:
        """Maps ranges of this part to positions of the epoch."""
        found: list[Range] = []
        own = zip(self.ranges, pairwise(self._starts), strict=True)
        for (start, _), (at, stop) in own:
            for first, end in left:
                begin, until = max(first, at), min(end, stop)
                if begin < until:
                    found.append((start + begin - at, start + until - at))
        return PartRanges(tuple(joined(found)))

    def sizes_in(self, sizes: BatchSizes) -> BatchSizes:
        """Returns the part's global batches: whole ones of the epoch, or their rest."""
        ends = [*accumulate(chain.from_iterable(repeat(*run) for run in sizes.runs))]
        found: list[int] = []
        for start, stop in self.ranges:
            inside = ends[bisect_right(ends, start) : bisect_left(ends, stop)]
            found += [b - a for a, b in pairwise([start, *inside, stop])]
        return BatchSizes.of(found)

    def steps_in(self, sizes: BatchSizes, steps: int) -> BatchSizes:
        """Returns the part's batches in ``steps`` steps, sized like the epoch's last.

        Surplus positions (of ranks that have died) are spread over the batches, from
        the last one on. With fewer positions the batches are of equal size.

        Args:
            sizes: the epoch's batch sizes.
            steps: number of global batches, at least 1.
        """
        steps = min(steps, self.num_positions)
        first, last = sizes.num_batches - steps, [0] * steps
        if first >= 0:
            last = [sizes.run_of(at)[0] for at in range(first, sizes.num_batches)]
        more = self.num_positions - sum(last)
        if more < 0:
            last, more = [0] * steps, self.num_positions
        each, rest = divmod(more, steps)
        return BatchSizes.of(
            [size + each + (at >= steps - rest) for at, size in enumerate(last)]
        )


@dataclass(frozen=True, slots=True)
class EpochRest:
    """Remainder of an epoch that is run in parts.

    Attributes:
        sizes: the epoch's global batches.
        left: positions to train on.
        steps: number of global batches for the rest after ranks have died; 0 keeps the
            epoch's batches, less their trained samples.
    """

    sizes: BatchSizes
    left: PartRanges
    steps: int = 0

    @staticmethod
    def whole(sizes: BatchSizes) -> EpochRest:
        """Returns the rest at an epoch's start: all of it."""
        return EpochRest(sizes, PartRanges(((0, sizes.num_samples),)))

    @property
    def part_sizes(self) -> BatchSizes:
        """Global batches of the next part."""
        if self.steps:
            return self.left.steps_in(self.sizes, self.steps)
        is_whole = self.left.num_positions == self.sizes.num_samples
        return self.sizes if is_whole else self.left.sizes_in(self.sizes)

    def after(self, end: EndEpoch) -> EpochRest:
        """Returns the rest after a part has ended."""
        steps = end.steps
        if self.steps and not steps:
            sizes, left = self.part_sizes, sum(stop - start for start, stop in end.left)
            done = round(sizes.batches_in(sizes.num_samples - left))
            steps = sizes.num_batches - done
        return EpochRest(self.sizes, self.left.origins_of(end.left), steps)


def whole_end(parts: Sequence[EndEpoch]) -> EndEpoch:
    """Merges the ends of all parts of one epoch, as if it had not been cut."""
    return replace(
        parts[-1],
        samples=sum(part.samples for part in parts),
        sync_s=sum(part.sync_s for part in parts),
        windows=sum(part.windows for part in parts),
    )
