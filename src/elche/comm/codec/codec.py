"""Codecs for slow links: float32 values in fewer bytes, and back.

======  ===================  =========================================
codec   bytes of n elements  largest error of an element
======  ===================  =========================================
fp32    4 n                  none
bf16    2 n                  0.4 % of its magnitude
int8    ceil(n / 128) × 130  0.4 % of the largest magnitude in a block
int4    ceil(n / 32) × 18    7.2 % of the largest magnitude in a block
======  ===================  =========================================

The quantised codecs cut the values into blocks. A block has one scale, the largest
magnitude in it over the largest code (127 or 7), rounded up to bfloat16. An element is
the nearest multiple of the scale (blockwise absmax quantisation, Dettmers et al.,
arXiv:2110.02861; the codes here are equally spaced, so that decoding is one product).
Block sizes are measured (`docs/decisions.md`, "Codec").

Decoding is elementwise arithmetic of IEEE floats without denormal numbers, which some
processors round away: the same bytes give the same values everywhere. A block that
holds NaN, infinity or a magnitude of 2^127 and more decodes to NaN; bfloat16 keeps NaN
and infinity themselves.
"""

from __future__ import annotations

import math
from typing import final

import torch

from elche.errors import ConfigError

LIMIT = 2.0**127
"""Smallest magnitude that counts as not finite."""

SMALLEST_SCALE = 2.0**-126


@final
class Codec:
    """Encoding of float32 values in blocks.

    With 4 bits the first half of a block is the low half of its bytes, the second half
    the high one, each as code + 8.

    Args:
        name: name in the settings.
        bits: of a code; with 16 or more elements are floats without a scale.
        block: elements that share a scale; even with 4 bits.

    Attributes:
        code_bytes: bytes of a block's elements.
        scale_bytes: bytes of a block's scale; 0 for none.
        largest_code: of an integer code.
    """

    def __init__(self, name: str, bits: int, block: int = 1) -> None:
        self.name = name
        self.bits = bits
        self.block = block
        self.code_bytes = block * bits // 8
        self.scale_bytes = 2 if bits < 16 else 0
        self.largest_code = 127 if bits == 8 else 7
        self._dtype = {32: torch.float32, 16: torch.bfloat16}.get(bits)

    def encoded_bytes(self, numel: int) -> int:
        """Exact size of so many elements, encoded; the last block is filled up."""
        return -(-numel // self.block) * (self.code_bytes + self.scale_bytes)

    def encode(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> bool:
        """Encodes whole blocks.

        Args:
            values: float32, a row per block; unchanged.
            codes: uint8, a row of `code_bytes` per block.
            scales: bfloat16, one per block.

        Returns:
            True if all values are numbers of magnitudes below 2^127.
        """
        scaled = values.abs()
        if self._dtype is not None:
            codes.view(self._dtype).copy_(values)
            return bool(scaled.amax() < LIMIT)
        largest = scaled.amax(dim=1)
        rounded = self._rounded_scales(largest)
        scales.copy_(rounded)
        inverses = torch.where(rounded > 0.0, rounded.reciprocal(), 0.0)
        torch.mul(values, inverses[:, None], out=scaled).round_()
        if self.bits == 8:
            codes.view(torch.int8).copy_(scaled)
        else:
            half = self.block // 2
            low, high = scaled[:, :half], scaled[:, half:]
            codes.copy_(low.add_(high, alpha=16.0).add_(8.0 + 16.0 * 8.0))
        return bool((largest < LIMIT).all())

    def _rounded_scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Float32 values that bfloat16 holds exactly; 0 for none, NaN for NaN or Inf.

        Adding just under one unit of bfloat16 to the bits of a positive float32 and
        cutting them there rounds up.
        """
        bits = (largest / self.largest_code).view(torch.int32)
        scales = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
        scales = torch.where(scales >= SMALLEST_SCALE, scales, 0.0)
        return torch.where(largest < LIMIT, scales, math.nan)

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Decodes whole blocks into ``out``; arguments as in :meth:`encode`."""
        if self._dtype is not None:
            out.copy_(codes.view(self._dtype))
            return
        factors = scales.to(torch.float32)[:, None]
        if self.bits == 8:
            out.copy_(codes.view(torch.int8)).mul_(factors)
            return
        half = self.block // 2
        out[:, half:].copy_(codes.bitwise_right_shift(4))
        out[:, :half].copy_(codes.bitwise_and(15))
        out.sub_(8.0).mul_(factors)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", 32),
        Codec("bf16", 16),
        Codec("int8", 8, 128),
        Codec("int4", 4, 32),
    )
}


def codec_named(name: str) -> Codec:
    """The codec of this name.

    Raises:
        ConfigError: no codec has this name.
    """
    if name not in CODECS:
        known = ", ".join(CODECS)
        raise ConfigError(f"unknown codec {name!r}; expected one of: {known}")
    return CODECS[name]
