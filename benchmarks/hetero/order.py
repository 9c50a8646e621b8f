"""The order of samples of a run of one part."""

from __future__ import annotations

import torch
from torch.utils.data import RandomSampler

from elche.demo.batches import Order, SegmentSampler


def sampler_of(num_samples: int, segments: int, seed: int) -> Order:
    """One shuffled order in so many parts; of one part torch's own, the same.

    With that a run outlives its first rank, which alone has the state of any other.
    """
    if segments > 1:
        return SegmentSampler(num_samples, segments, seed)
    generator = torch.Generator().manual_seed(seed)
    return RandomSampler(range(num_samples), generator=generator)
