"""Layout of encoded messages, and partition of a sum into parts owned by ranks.

Layout: codes of all blocks, their scales, exact elements, the sender's weight, the
message's number. The number is last, so that a receiver sees by it that all arrived.
"""

from __future__ import annotations

from typing import final

import torch

from elche.comm.codec.codec import Codec

CHUNK_ELEMENTS = 262_144
"""Elements worked on at a time. A quarter as many stay in a core's cache, but take 1.3
times as long, because the calls dominate then."""
TRAILER_BYTES = 8


@final
class CodedMessage:
    """Encoded elements of one part, then exact elements (float32), weight and number.

    Args:
        codec: encoding of the elements.
        part: elements of the whole; begins at a multiple of the codec's block.
        exact: number of elements beside the part that travel as float32.

    Attributes:
        memory: the bytes that travel; uint8, flat.
        part: as given.
        exact: the elements that travel as float32.
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
        """Number of the message; 0 before its last byte arrived.

        Waiting for the transfer makes sure of the bytes before it.
        """
        return int(self._number[0])

    def seal(self, weight: float, number: int) -> None:
        """Writes the trailer."""
        self._weight[0] = weight
        self._number[0] = number

    def clear(self) -> None:
        """Prepares for an arrival."""
        self._number[0] = 0

    def write(self, chunk: range, values: torch.Tensor) -> bool:
        """Encodes a chunk of the part.

        Args:
            chunk: whole blocks, or all elements to the part's end.
            values: the elements; float32, flat, unchanged.

        Returns:
            True if all of them are finite (and below 2^127).
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
        # Whole blocks are decoded in place, cut ones by way of a copy.
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
    """Consecutive elements per rank: whole blocks, their numbers equal or one apart.

    Some ranks have an empty part if there are more ranks than blocks.
    """
    blocks = -(-numel // block)
    each, more = divmod(blocks, world_size)
    parts, start = [], 0
    for rank in range(world_size):
        stop = start + each + (rank < more)
        # The last block may be cut, and empty parts come after it.
        parts.append(range(min(numel, start * block), min(numel, stop * block)))
        start = stop
    return parts


def chunks_of(part: range) -> list[range]:
    """The part in chunks of :data:`CHUNK_ELEMENTS`, the last one of the rest."""
    size = CHUNK_ELEMENTS
    return [part[offset : offset + size] for offset in range(0, len(part), size)]


def _in_words(size_bytes: int) -> int:
    """The size rounded up to a multiple of 8 bytes."""
    return -(-size_bytes // 8) * 8
