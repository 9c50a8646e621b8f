"""Layout of encoded messages, and partition of a sum into parts owned by ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from elche.comm.codec.codec import CHUNK_ELEMENTS, Codec

TRAILER_BYTES = 8
EXACT_BYTES = 4


@final
class CodedMessage:
    """Encoded elements, then exact ones and the sender's weight (float32), a number.

    Args:
        codec: how the elements are encoded.
        part: which elements of the whole; begins at a multiple of the codec's block.
        scratch: what encoding may write to; see :meth:`Codec.over`.
        exact: how many elements beside the part travel as they are.

    Attributes:
        memory: what travels; uint8, flat.
        part: as given.
        exact: the elements that travel as they are.
    """

    def __init__(
        self,
        codec: Codec,
        part: range,
        scratch: torch.Tensor | None = None,
        exact: int = 0,
    ) -> None:
        size_bytes = self.size_bytes(codec, len(part), exact)
        begin, first = size_bytes - TRAILER_BYTES, _trailer_offset(codec, len(part))
        self.part = part
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
        last = first + EXACT_BYTES * exact
        self.exact = self.memory[first:last].view(torch.float32)
        encoded = self.memory[: codec.encoded_bytes(len(part))]
        self._body = codec.over(encoded, len(part), scratch)
        self._weight = self.memory[begin : begin + 4].view(torch.float32)
        self._number = self.memory[begin + 4 :].view(torch.int32)

    @staticmethod
    def size_bytes(codec: Codec, numel: int, exact: int = 0) -> int:
        """Bytes that travel: of both kinds of elements, filled up to 8, and 8 more."""
        exact_bytes = -(-EXACT_BYTES * exact // 8) * 8
        return _trailer_offset(codec, numel) + exact_bytes + TRAILER_BYTES

    @property
    def weight(self) -> float:
        """What the sender's elements weigh; NaN if they are not all finite."""
        return float(self._weight[0])

    @property
    def number(self) -> int:
        """The message's number; 0 before it has come as a whole.

        It is the last that arrives, but only waiting for the transfer makes sure of
        what stands before it.
        """
        return int(self._number[0])

    def seal(self, weight: float, number: int) -> None:
        """Ends the message."""
        self._weight[0] = weight
        self._number[0] = number

    def clear(self) -> None:
        """Prepares for an arrival."""
        self._number[0] = 0

    def write(self, start: int, values: torch.Tensor) -> bool:
        """Encodes elements from ``start``, counted in the whole; see :meth:`read`.

        Returns:
            Whether all of them are finite (and below 2^127).
        """
        return self._body.write(start - self.part.start, values)

    def read(self, start: int, out: torch.Tensor) -> None:
        """Decodes whole blocks from ``start``, counted in the whole, or to the end."""
        self._body.read(start - self.part.start, out)


def parts_of(numel: int, world_size: int, block: int) -> list[range]:
    """Consecutive elements per rank: whole blocks, their numbers equal or one apart.

    Ranks come away empty where there are more of them than blocks.
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


def chunks_of(part: range, limit: int = CHUNK_ELEMENTS) -> Sequence[range]:
    """The part in pieces that stay in a core's cache; all but the last whole blocks.

    Args:
        part: the elements; begins at a multiple of the block.
        limit: elements of a piece.
    """
    return [part[offset : offset + limit] for offset in range(0, len(part), limit)]


def _trailer_offset(codec: Codec, numel: int) -> int:
    return -(-codec.encoded_bytes(numel) // 8) * 8
