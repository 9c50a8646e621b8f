"""Batches of an epoch: ranges of them, their samples, global and local ones. Pure.

The user's sampler yields *global* batches. Steps of ``sync`` are these; windows train
on *local* batches, into which each global one is cut (`BatchCut`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elche.errors import ProtocolError

Range = tuple[int, int]
"""Batches ``start <= batch < stop``."""


@dataclass(frozen=True, slots=True)
class BatchCut:
    """Cut of each global batch into local ones: nearly equal, the larger first.

    Attributes:
        parts: local batches of a global one, at least.
        most: samples of a local batch at most; 0 for no limit.
        least: no local batch has fewer samples, wherever the global one has as many.
    """

    parts: int = 1
    most: int = 0
    least: int = 1

    def __post_init__(self) -> None:
        if self.parts < 1 or self.most < 0 or self.least < 1:
            raise ProtocolError(f"expected a cut into 1 part or more, got {self}")

    def parts_of(self, samples: int) -> int:
        """Local batches of a global batch."""
        wanted = -(-samples // self.most) if self.most else 1
        return max(1, min(max(self.parts, wanted), samples // self.least))

    def largest_of(self, samples: int) -> int:
        """Samples of the largest local batch of a global batch."""
        return -(-samples // self.parts_of(samples))

    def to_wire(self) -> tuple[int, ...]:
        """Fields for messages and records."""
        return self.parts, self.most, self.least


WHOLE_BATCHES = BatchCut()


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes of an epoch, as runs of (samples, number of batches).

    Attributes:
        runs: sizes of the global batches.
        cut: batches are numbered and counted as this cuts the global ones.
    """

    runs: tuple[Range, ...]
    cut: BatchCut = WHOLE_BATCHES
    _starts: tuple[tuple[int, int, int], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if any(samples < 1 or count < 1 for samples, count in self.runs):
            raise ProtocolError(f"expected runs of at least 1 sample, got {self.runs}")
        starts, at = [], (0, 0, 0)
        for samples, count in self.runs:
            starts.append(at)
            parts = self.cut.parts_of(samples)
            at = (at[0] + parts * count, at[1] + count, at[2] + samples * count)
        object.__setattr__(self, "_starts", (*starts, at))

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
        return self._starts[-1][0]

    @property
    def num_samples(self) -> int:
        """Samples (positions) of the epoch."""
        return self._starts[-1][2]

    def run_of(self, batch: int) -> tuple[int, int]:
        """Size of a batch, and the first batch after its run of equal sizes."""
        run = self._run(batch)
        samples = self.runs[run][0]
        parts = self.cut.parts_of(samples)
        less, larger = divmod(samples, parts)
        if not larger:
            return less, self._starts[run + 1][0]
        part = (batch - self._starts[run][0]) % parts
        if part < larger:
            return less + 1, batch - part + larger
        return less, batch - part + parts

    def factor_of(self, batch: int) -> int:
        """Local batches of a batch's global one: the factor of a sum over its samples.

        The mean of these products is the sum over the global batch.
        """
        return self.cut.parts_of(self.runs[self._run(batch)][0])

    def part_of(self, batch: int) -> tuple[int, int, int]:
        """The global batch of a batch, its first sample there, and one past its last.

        All of it where batches are not cut.
        """
        run = self._run(batch)
        samples, (first, whole, _) = self.runs[run][0], self._starts[run]
        parts = self.cut.parts_of(samples)
        before, part = divmod(batch - first, parts)
        less, larger = divmod(samples, parts)
        start = part * less + min(part, larger)
        return whole + before, start, start + less + (part < larger)

    def position_of(self, batch: int) -> int:
        """The epoch's first sample of a batch; past the last one, their number."""
        if batch == self.num_batches:
            return self.num_samples
        run = self._run(batch)
        _, whole, position = self._starts[run]
        at, start, _ = self.part_of(batch)
        return position + (at - whole) * self.runs[run][0] + start

    def samples_in(self, start: int, stop: int) -> int:
        """Samples of the batches ``start <= batch < stop``."""
        if start >= stop:
            return 0
        return self.position_of(stop) - self.position_of(start)

    def cut_by(self, cut: BatchCut) -> BatchSizes:
        """The same epoch, its global batches cut in this way."""
        return BatchSizes(self.runs, cut)

    def _run(self, batch: int) -> int:
        run = bisect_right(self._starts, batch, key=lambda start: start[0]) - 1
        if not 0 <= run < len(self.runs):
            raise ProtocolError(f"batch {batch} is outside 0..{self.num_batches - 1}")
        return run

    def batches_in(self, samples: float) -> float:
        """Number of global batches that the first samples fill, with fractions.

        All of them beyond the epoch's end.
        """
        batches = 0.0
        for size, count in self.runs:
            batches += min(float(count), max(0.0, samples / size))
            samples -= size * count
        return batches


def count_batches(ranges: Iterable[Range]) -> int:
    """Batches of some ranges."""
    return sum(stop - start for start, stop in ranges)


def append_range(ranges: deque[Range] | list[Range], part: Range) -> None:
    """Appends a range, joined to the last one where they touch."""
    if ranges and ranges[-1][1] == part[0]:
        ranges[-1] = (ranges[-1][0], part[1])
    else:
        ranges.append(part)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same batches as few ranges, in order."""
    parts: list[Range] = []
    for part in sorted(ranges):
        append_range(parts, part)
    return parts


def without(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Parts of the ranges that are in none of the others."""
    found, taken = [], sorted(others)
    for start, stop in ranges:
        for first, last in (*taken, (stop, stop)):
            if start < min(first, stop):
                found.append((start, min(first, stop)))
            start = max(start, last)
    return found


def named(ranges: Iterable[Range]) -> str:
    """Batches in words, as in "3, 5 to 7"; "none" without any."""
    found = (
        str(start) if stop == start + 1 else f"{start} to {stop - 1}"
        for start, stop in joined(ranges)
    )
    return ", ".join(found) or "none"
