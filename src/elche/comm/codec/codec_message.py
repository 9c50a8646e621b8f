"""Layout of encoded messages, and partition of a sum into parts owned by ranks.

Layout: codes of all blocks, their scales, exact elements, the sender's weight, the
message's number. The number is last, so its arrival marks the message as complete.
"""

from __future__ import annotations

from typing import final

import torch

from elche.comm.codec.codec import Codec

CHUNK_ELEMENTS = 262_144
"""Elements per chunk. A quarter of this fits a core's cache, but takes 1.3 times as
long, because call overhead dominates."""
TRAILER_BYTES = 8


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
