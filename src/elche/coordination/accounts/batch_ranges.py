"""Batch ranges of an epoch: global and local batches, and their samples. Pure.

The user's sampler yields *global* batches. ``sync`` takes one step per global batch.
Windows train on *local* batches, into which each global one is cut (`BatchCut`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elche.errors import ProtocolError

Range = tuple[int, int]
"""Range of batches, ``start <= batch < stop``."""


@dataclass(frozen=True, slots=True)
class BatchCut:
    """Cut of each global batch into local ones: nearly equal, the larger first.

    Attributes:
        parts: least number of local batches per global batch.
        most: most samples of a local batch; 0 for no limit.
        least: least samples of a local batch, unless the global batch has fewer.
    """

    parts: int = 1
    most: int = 0
    least: int = 1

    def __post_init__(self) -> None:
        if self.parts < 1 or self.most < 0 or self.least < 1:
            raise ProtocolError(f"expected a cut into 1 part or more, got {self}")

    def parts_of(self, samples: int) -> int:
        """Returns the number of local batches of a global batch."""
        wanted = -(-samples // self.most) if self.most else 1
        return max(1, min(max(self.parts, wanted), samples // self.least))

    def largest_of(self, samples: int) -> int:
        """Returns the samples of a global batch's largest local batch."""
        return -(-samples // self.parts_of(samples))

    def to_wire(self) -> tuple[int, ...]:
        """Returns the fields as a plain tuple for messages and records."""
        return self.parts, self.most, self.least


WHOLE_BATCHES = BatchCut()


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes of an epoch, as runs of (samples, number of batches).

    Attributes:
        runs: sizes of the global batches.
        cut: cut of the global batches; batch numbers and counts are of local batches.
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
        """Number of (local) batches in the epoch."""
        return self._starts[-1][0]

    @property
    def num_samples(self) -> int:
        """Number of samples (positions) in the epoch."""
        return self._starts[-1][2]

    def run_of(self, batch: int) -> tuple[int, int]:
        """Returns a batch's size, and the first batch after its run of equal sizes."""
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
        """Returns the number of local batches in a batch's global batch.

        A sum over local samples is multiplied by it: their mean is the global sum.
        """
        return self.cut.parts_of(self.runs[self._run(batch)][0])

    def part_of(self, batch: int) -> tuple[int, int, int]:
        """Returns a batch's place: global batch, first sample in it, one past the last.

        Without a cut, a batch is a whole global batch.
        """
        run = self._run(batch)
        samples, (first, whole, _) = self.runs[run][0], self._starts[run]
        parts = self.cut.parts_of(samples)
        before, part = divmod(batch - first, parts)
        less, larger = divmod(samples, parts)
        start = part * less + min(part, larger)
        return whole + before, start, start + less + (part < larger)

    def position_of(self, batch: int) -> int:
        """Returns the position of a batch's first sample; `num_samples` at the end."""
        if batch == self.num_batches:
            return self.num_samples
        run = self._run(batch)
        _, whole, position = self._starts[run]
        at, start, _ = self.part_of(batch)
        return position + (at - whole) * self.runs[run][0] + start

    def samples_in(self, start: int, stop: int) -> int:
        """Returns the samples of the batches ``start <= batch < stop``."""
        if start >= stop:
            return 0
        return self.position_of(stop) - self.position_of(start)

    def cut_by(self, cut: BatchCut) -> BatchSizes:
        """Returns the same epoch with its global batches cut by ``cut``."""
        return BatchSizes(self.runs, cut)

    def _run(self, batch: int) -> int:
        run = bisect_right(self._starts, batch, key=lambda start: start[0]) - 1
        if not 0 <= run < len(self.runs):
            raise ProtocolError(f"batch {batch} is outside 0..{self.num_batches - 1}")
        return run

    def batches_in(self, samples: float) -> float:
        """Returns how many global batches the first ``samples`` fill, with fractions.

        Beyond the epoch's end it returns the number of all global batches.
        """
        batches = 0.0
        for size, count in self.runs:
            batches += min(float(count), max(0.0, samples / size))
            samples -= size * count
        return batches


def count_batches(ranges: Iterable[Range]) -> int:
    """Returns the number of batches in some ranges."""
    return sum(stop - start for start, stop in ranges)


def append_range(ranges: deque[Range] | list[Range], part: Range) -> None:
    """Appends a range; merges it with the last one if they are adjacent."""
    if ranges and ranges[-1][1] == part[0]:
        ranges[-1] = (ranges[-1][0], part[1])
    else:
        ranges.append(part)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Returns sorted ranges with the same batches, adjacent ranges merged."""
    parts: list[Range] = []
    for part in sorted(ranges):
        append_range(parts, part)
    return parts


def without(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Returns the parts of ``ranges`` that no range of ``others`` covers."""
    found, taken = [], sorted(others)
    for start, stop in ranges:
        for first, last in (*taken, (stop, stop)):
            if start < min(first, stop):
                found.append((start, min(first, stop)))
            start = max(start, last)
    return found


def named(ranges: Iterable[Range]) -> str:
    """Formats batches as in "3, 5 to 7"; "none" without any."""
    found = (
        str(start) if stop == start + 1 else f"{start} to {stop - 1}"
        for start, stop in joined(ranges)
    )
    return ", ".join(found) or "none"
