"""How far an element may be off once it is encoded and decoded."""

from __future__ import annotations

import torch

from elche.comm.codec.codec import SMALLEST_SCALE, Codec

SCALE_SLACK = (1.0 + 2.0**-7) * (1.0 + 2.0**-13)
"""Rounding a scale up to bfloat16, and dividing by it, may add this much."""


def error_bound(codec: Codec, largest: float) -> float:
    """The largest error in a block whose largest magnitude is this, below 2^127."""
    if codec.bits < 16:
        # A scale below the smallest one is none: what it stood for is the error.
        lost = codec.largest_code * SMALLEST_SCALE
        return max(largest / codec.largest_code * SCALE_SLACK / 2, min(largest, lost))
    if codec.name == "fp32":
        return 0.0
    return largest * torch.finfo(torch.bfloat16).eps / 2 + 2.0**-134
