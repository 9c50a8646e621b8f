"""Codecs for slow links: float32 values in fewer bytes, and back.

======  ===================  =========================================
codec   bytes of n elements  largest error of an element
======  ===================  =========================================
fp32    4 n                  none
bf16    2 n                  0.4 % of its magnitude
int8    ceil(n / 128) × 130  0.4 % of the largest magnitude in a block
int4    ceil(n / 32) × 18    7.2 % of the largest magnitude in a block
======  ===================  =========================================

The two quantised ones cut the values into blocks. A block has one scale, the largest
magnitude in it over the largest code (127 or 7), rounded up to bfloat16, and an element
is the nearest multiple of it (blockwise absmax quantisation, Dettmers et al.,
arXiv:2110.02861; the codes here are equally spaced, so that decoding is one product).
Block sizes are measured ones (`docs/decisions.md`, "Codec").

Decoding is elementwise arithmetic of IEEE floats, and nothing in it is denormal, which
some processors round away: the same bytes give the same values everywhere. A block that
holds NaN, infinity or a magnitude of 2^127 and more decodes to NaN; bfloat16 keeps NaN
and infinity themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from typing_extensions import override

from elche.errors import ConfigError

INT8_BLOCK = 128
INT4_BLOCK = 32
CHUNK_ELEMENTS = 262_144
"""Elements worked on at a time. A quarter as many stay in a core's cache, but take 1.3
times as long: the calls are what costs then, and each takes the interpreter from the
training thread."""

LIMIT = 2.0**127
"""Magnitudes from here on count as not finite."""

SMALLEST_SCALE = 2.0**-126


class Codec(ABC):
    """How float32 values travel.

    Attributes:
        name: what the user calls it.
        block: elements that are encoded together; parts of a message begin at
            multiples of it.
    """

    name: str
    block: int

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Exact size of so many elements, encoded."""

    @abstractmethod
    def over(
        self, memory: torch.Tensor, numel: int, scratch: torch.Tensor | None = None
    ) -> Encoded:
        """Encoded elements in existing memory.

        Args:
            memory: uint8, flat, of :meth:`encoded_bytes`; begins at an even address.
            numel: elements.
            scratch: float32 memory of `CHUNK_ELEMENTS` that encoding may write to; None
                for memory of its own.
        """


class Encoded(ABC):
    """Encoded elements; made by :meth:`Codec.over`."""

    @abstractmethod
    def write(self, start: int, values: torch.Tensor) -> bool:
        """Encodes some elements.

        Args:
            start: the first one; a multiple of the codec's block.
            values: float32, flat, on the memory's device; left as they are. Whole
                blocks, or all elements to the end.

        Returns:
            Whether all of them are numbers of magnitudes below 2^127.
        """

    @abstractmethod
    def read(self, start: int, out: torch.Tensor) -> None:
        """Decodes some elements.

        Args:
            start: the first one; a multiple of the codec's block.
            out: float32, flat, on the memory's device. Whole blocks, or all elements
                to the end.
        """


@final
class PlainCodec(Codec):
    """Every element by itself, in a floating-point format.

    Args:
        name: what the user calls it.
        dtype: the format.
    """

    block = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    @override
    def encoded_bytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    @override
    def over(
        self, memory: torch.Tensor, numel: int, scratch: torch.Tensor | None = None
    ) -> Encoded:
        return _PlainEncoded(memory.view(self._dtype))


@final
class _PlainEncoded(Encoded):
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def write(self, start: int, values: torch.Tensor) -> bool:
        self._values[start : start + values.numel()].copy_(values)
        return not values.numel() or bool(values.abs().amax() < LIMIT)

    def read(self, start: int, out: torch.Tensor) -> None:
        out.copy_(self._values[start : start + out.numel()])


@final
class BlockCodec(Codec):
    """Whole numbers times a scale per block.

    Layout: the codes of all blocks, then their scales in bfloat16. The last block is
    filled up with zeros. In four bits the first half of a block is the low half of its
    bytes, the second half the high one, each as code + 8.

    Args:
        name: what the user calls it.
        bits: of a code; 8 or 4.
        block: elements that share a scale; even, and a divisor of 262144.

    Raises:
        ConfigError: there is no such codec.
    """

    def __init__(self, name: str, bits: int, block: int) -> None:
        if bits not in (4, 8) or block < 2 or CHUNK_ELEMENTS % block:
            raise ConfigError(
                f"expected 4 or 8 bits and a block of 2, 4, 8, ... {CHUNK_ELEMENTS} "
                f"elements, got {bits} bits and a block of {block}"
            )
        self.name = name
        self.bits = bits
        self.block = block
        self.largest_code = 127 if bits == 8 else 7

    @override
    def encoded_bytes(self, numel: int) -> int:
        blocks = -(-numel // self.block)
        return blocks * (self.block * self.bits // 8 + 2)

    @override
    def over(
        self, memory: torch.Tensor, numel: int, scratch: torch.Tensor | None = None
    ) -> Encoded:
        if scratch is None:
            scratch = torch.empty(0, dtype=torch.float32, device=memory.device)
        return _BlockEncoded(self, memory, numel, scratch)


@final
class _BlockEncoded(Encoded):
    def __init__(
        self,
        codec: BlockCodec,
        memory: torch.Tensor,
        numel: int,
        scratch: torch.Tensor,
    ) -> None:
        blocks = -(-numel // codec.block)
        bytes_of_codes = blocks * codec.block * codec.bits // 8
        self._codec = codec
        self._numel = numel
        self._codes = memory[:bytes_of_codes].view(blocks, -1) if blocks else memory
        self._scales = memory[bytes_of_codes:].view(torch.bfloat16)
        self._scratch = scratch

    def write(self, start: int, values: torch.Tensor) -> bool:
        size, block = values.numel(), self._codec.block
        is_finite = True
        for offset in range(0, size, CHUNK_ELEMENTS):
            chunk = values[offset : offset + CHUNK_ELEMENTS]
            first = (start + offset) // block
            if chunk.numel() % block:
                chunk = self._filled_up(chunk)
            is_finite &= self._write_blocks(first, chunk.view(-1, block))
        return is_finite

    def read(self, start: int, out: torch.Tensor) -> None:
        size, block = out.numel(), self._codec.block
        for offset in range(0, size, CHUNK_ELEMENTS):
            chunk = out[offset : offset + CHUNK_ELEMENTS]
            first = (start + offset) // block
            whole = chunk.numel() // block
            if whole:
                self._read_blocks(first, chunk[: whole * block].view(whole, block))
            if rest := chunk.numel() - whole * block:
                last = out.new_empty(1, block)
                self._read_blocks(first + whole, last)
                chunk[whole * block :].copy_(last[0, :rest])

    def _filled_up(self, values: torch.Tensor) -> torch.Tensor:
        whole = -(-values.numel() // self._codec.block) * self._codec.block
        filled = values.new_zeros(whole)
        filled[: values.numel()].copy_(values)
        return filled

    def _write_blocks(self, first: int, values: torch.Tensor) -> bool:
        codes = self._codes[first : first + len(values)]
        scaled = self._scratch_like(values)
        largest = torch.amax(torch.abs(values, out=scaled), dim=1)
        scales = self._scales_of(largest)
        self._scales[first : first + len(values)].copy_(scales)
        inverses = torch.where(scales > 0.0, scales.reciprocal(), 0.0)
        torch.mul(values, inverses[:, None], out=scaled).round_()
        if self._codec.bits == 8:
            codes.view(torch.int8).copy_(scaled)
        else:
            half = self._codec.block // 2
            low, high = scaled[:, :half], scaled[:, half:]
            codes.copy_(low.add_(high, alpha=16.0).add_(8.0 + 16.0 * 8.0))
        return bool((largest < LIMIT).all())

    def _scales_of(self, largest: torch.Tensor) -> torch.Tensor:
        """Float32 values that bfloat16 holds exactly; 0 for none, NaN for NaN or Inf.

        Adding just under one unit of bfloat16 to the bits of a positive float32 and
        cutting them there rounds up.
        """
        bits = (largest / self._codec.largest_code).view(torch.int32)
        scales = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
        scales = torch.where(scales >= SMALLEST_SCALE, scales, 0.0)
        return torch.where(largest < LIMIT, scales, math.nan)

    def _read_blocks(self, first: int, out: torch.Tensor) -> None:
        codes = self._codes[first : first + len(out)]
        scales = self._scales[first : first + len(out)].to(torch.float32)[:, None]
        if self._codec.bits == 8:
            out.copy_(codes.view(torch.int8)).mul_(scales)
            return
        half = self._codec.block // 2
        low, high = out[:, :half], out[:, half:]
        high.copy_(codes.bitwise_right_shift(4))
        low.copy_(codes.bitwise_and(15))
        out.sub_(8.0).mul_(scales)

    def _scratch_like(self, values: torch.Tensor) -> torch.Tensor:
        if self._scratch.numel() < values.numel():
            self._scratch = torch.empty_like(values).view(-1)
        return self._scratch[: values.numel()].view(values.shape)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        PlainCodec("fp32", torch.float32),
        PlainCodec("bf16", torch.bfloat16),
        BlockCodec("int8", 8, INT8_BLOCK),
        BlockCodec("int4", 4, INT4_BLOCK),
    )
}


def codec_named(name: str) -> Codec:
    """The codec of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CODECS:
        known = ", ".join(CODECS)
        raise ConfigError(f"unknown codec {name!r}; expected one of: {known}")
    return CODECS[name]
