"""Ranges of an epoch's batches, and how many samples they have. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from elche.errors import ProtocolError

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
        return self._ends[-1] if self._ends else 0

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


def named(ranges: Iterable[Range]) -> str:
    """Batches in words, as in "3, 5 to 7"; "none" without any."""
    return (
        ", ".join(
            str(start) if stop == start + 1 else f"{start} to {stop - 1}"
            for start, stop in joined(ranges)
        )
        or "none"
    )
