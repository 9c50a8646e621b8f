"""Codecs for slow links: float32 values in fewer bytes, and back.

======  ===================  =========================================
codec   bytes of n elements  largest error of an element
======  ===================  =========================================
fp32    4 n                  none
bf16    2 n                  0.4 % of its magnitude
int8    ceil(n / 128) × 130  0.4 % of the largest magnitude in a block
int4    ceil(n / 32) × 18    7.2 % of the largest magnitude in a block
======  ===================  =========================================

The quantised codecs cut the values into blocks. A block's scale is its largest
magnitude over the largest code (127 or 7), rounded up to bfloat16. Each element is
encoded as the nearest multiple of the scale (blockwise absmax quantisation, Dettmers et
al., arXiv:2110.02861; our codes are equally spaced, so that decoding is one product).
Block sizes were chosen by measurement (`docs/decisions.md`, "Codec").

Decoding is elementwise IEEE arithmetic without denormals, which some processors flush
to zero, so the same bytes give the same values everywhere. A block with NaN, infinity
or a magnitude of 2^127 or more decodes to NaN; bfloat16 keeps NaN and infinity.

A message holds codes of all blocks, their scales, exact elements, the sender's weight,
and the message's number. The number is last, so its arrival marks the message as
complete.
"""

from __future__ import annotations

import math
from typing import final

import torch

LIMIT = 2.0**127
"""Magnitude from which a value counts as not finite."""

SMALLEST_SCALE = 2.0**-126
CHUNK_ELEMENTS = 262_144
"""Elements per chunk. A quarter of this fits a core's cache, but takes 1.3 times as
long, because call overhead dominates."""
TRAILER_BYTES = 8


@final
class Codec:
    """Encoding of float32 values in blocks.

    With 4 bits, the low halves of a block's bytes hold its first half of elements, the
    high halves the second, each as code + 8.

    Args:
        name: name in the settings.
        bits: bits per code; with 16 or more, elements are floats without a scale.
        block: number of elements that share a scale; must be even with 4 bits.

    Attributes:
        code_bytes: bytes of a block's elements.
        scale_bytes: bytes of a block's scale; 0 without a scale.
        largest_code: largest integer code.
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
        """Returns the exact encoded size in bytes; the last block is padded."""
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
            True if all values are finite, with magnitudes below 2^127.
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
        """Rounds scales up to bfloat16, as float32; tiny ones to 0, non-finite to NaN.

        Adding just under one unit of bfloat16 to a positive float32's bits, and
        truncating, rounds up.
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


@final
class CodedMessage:
    """Encoded elements of one part, then exact elements (float32), weight and number.

    Args:
        codec: encoding of the elements.
        part: range of elements in the whole; begins at a multiple of the codec's block.
        exact: number of additional elements that are sent as float32.

    Attributes:
        memory: flat uint8 tensor with the bytes to send.
        part: range of elements in the whole.
        exact: elements that are sent as float32.
    """

    def __init__(self, codec: Codec, part: range, exact: int = 0) -> None:
        blocks = -(-len(part) // codec.block)
        codes_end = blocks * codec.code_bytes
        exact_begin = _in_words(codec.encoded_bytes(len(part)))
        trailer = exact_begin + _in_words(4 * exact)
        self.memory = torch.zeros(
            trailer + TRAILER_BYTES, dtype=torch.uint8, device="cpu"
        )
        self.part = part
        self.exact = self.memory[exact_begin : exact_begin + 4 * exact].view(
            torch.float32
        )
        self._codec = codec
        self._codes = self.memory[:codes_end].view(blocks, codec.code_bytes)
        scales_end = codes_end + codec.scale_bytes * blocks
        self._scales = self.memory[codes_end:scales_end].view(torch.bfloat16)
        self._weight = self.memory[trailer : trailer + 4].view(torch.float32)
        self._number = self.memory[trailer + 4 :].view(torch.int32)

    @property
    def weight(self) -> float:
        """Weight of the sender's elements; NaN if they are not all finite."""
        return float(self._weight[0])

    @property
    def number(self) -> int:
        """Number of the message; 0 until its last byte has arrived.

        Earlier bytes are only guaranteed after waiting for the transfer.
        """
        return int(self._number[0])

    def seal(self, weight: float, number: int) -> None:
        """Writes the trailer: weight and number."""
        self._weight[0] = weight
        self._number[0] = number

    def clear(self) -> None:
        """Resets the number before the message is received."""
        self._number[0] = 0

    def write(self, chunk: range, values: torch.Tensor) -> bool:
        """Encodes a chunk of the part.

        Args:
            chunk: range of whole blocks, or up to the part's end.
            values: flat float32 elements of the chunk; unchanged.

        Returns:
            True if all values are finite, with magnitudes below 2^127.
        """
        block = self._codec.block
        if missing := -len(chunk) % block:
            values = torch.nn.functional.pad(values, (0, missing))
        first = (chunk.start - self.part.start) // block
        rows = values.view(-1, block)
        places = slice(first, first + len(rows))
        return self._codec.encode(rows, self._codes[places], self._scales[places])

    def read(self, chunk: range, out: torch.Tensor) -> None:
        """Decodes any elements of the part into ``out``, float32 and flat."""
        block, offset = self._codec.block, self.part.start
        start, stop = chunk.start - offset, chunk.stop - offset
        # Whole blocks are decoded in place, partial blocks through a copy.
        first, last = -(-start // block), stop // block
        head = range(start, min(first * block, stop))
        tail = range(max(last * block, head.stop), stop)
        if first < last:
            whole = out[first * block - start : last * block - start]
            self._decode(first, last, whole.view(-1, block))
        for cut in (head, tail):
            if cut:
                at = cut.start // block
                copy = out.new_empty(1, block)
                self._decode(at, at + 1, copy)
                begin = cut.start - at * block
                out[cut.start - start : cut.stop - start].copy_(
                    copy[0, begin : begin + len(cut)]
                )

    def _decode(self, first: int, last: int, out: torch.Tensor) -> None:
        self._codec.decode(self._codes[first:last], self._scales[first:last], out)


def parts_of(numel: int, world_size: int, block: int) -> list[range]:
    """Splits elements into a part of whole blocks per rank, as equal as possible.

    Some ranks have an empty part if there are more ranks than blocks.
    """
    blocks = -(-numel // block)
    each, more = divmod(blocks, world_size)
    parts, start = [], 0
    for rank in range(world_size):
        stop = start + each + (rank < more)
        # The last block may be partial, and empty parts follow it.
        parts.append(range(min(numel, start * block), min(numel, stop * block)))
        start = stop
    return parts


def chunks_of(part: range) -> list[range]:
    """Splits a part into chunks of :data:`CHUNK_ELEMENTS`; the last may be shorter."""
    size = CHUNK_ELEMENTS
    return [part[offset : offset + size] for offset in range(0, len(part), size)]


def _in_words(size_bytes: int) -> int:
    """Rounds a size up to a multiple of 8 bytes."""
    return -(-size_bytes // 8) * 8
