"""The order of samples that all contenders share, and a batch split among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler


def split_edges(batch_size: int, shares: Sequence[float]) -> list[int]:
    """Bounds of each rank's part of a batch: ``len(shares) + 1`` edges."""
    total = sum(shares)
    return [round(batch_size * sum(shares[:r]) / total) for r in range(len(shares) + 1)]


class SegmentSampler(Sampler[int]):
    """One shuffled order of the whole set, handed out in consecutive parts.

    Each iteration yields the next part, so a run of several parts sees every sample
    once, whoever trains it.
    """

    def __init__(self, num_samples: int, segments: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_samples, generator=generator)
        self._parts = order.tensor_split(segments)
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        part = self._parts[self._next % len(self._parts)]
        self._next += 1
        return iter(part.tolist())

    def __len__(self) -> int:
        return len(self._parts[self._next % len(self._parts)])


Order = RandomSampler | SegmentSampler


class SplitBatches(Sampler[list[int]]):
    """Each rank's part of every global batch, by fixed shares."""

    def __init__(
        self, sampler: Order, batch_size: int, shares: Sequence[float], rank: int
    ) -> None:
        self._part = slice(*split_edges(batch_size, shares)[rank : rank + 2])
        self._batches = BatchSampler(sampler, batch_size, drop_last=True)

    @property
    def part_size(self) -> int:
        """Samples of this rank in every batch."""
        return int(self._part.stop - self._part.start)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[self._part] for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)
