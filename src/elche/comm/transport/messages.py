"""Messages from rank to rank: tensors with their shapes, and structure.

Through gloo a message is a frame of fixed size with its tag and its description, the
rest of the description where the frame is too small, and then the tensors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, final

import msgpack
import torch

from elche.errors import ProtocolError

FRAME_BYTES = 512
BETWEEN_STEPS = 1 << 26
"""Tag of messages between steps; those of steps have smaller ones."""
_START = struct.Struct("<qI")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Address:
    """The other end of a message.

    Attributes:
        rank: the other rank.
        tag: distinguishes messages between two ranks.
        what: description for errors.
    """

    rank: int
    tag: int
    what: str


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors for another rank, such as an activation or a gradient.

    Attributes:
        tensors: on the sender's device; at the receiver on the CPU, or on its device
            if they were sent from device to device.
        structure: their nesting, or any value that msgpack can write.
        needs_grad: per tensor, whether a gradient is to come back; in a message of
            gradients whether it is there.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    structure: Any = None
    needs_grad: tuple[bool, ...] = ()


@final
class Packed:
    """A message ready to be sent.

    Args:
        message: the message.
        on_device: whether its tensors go from device to device.

    Attributes:
        head: description of the message, msgpack.
        tensors: of the message, detached.

    Raises:
        ProtocolError: the type or layout of a tensor is not supported.
    """

    def __init__(self, message: Message, on_device: bool = False) -> None:
        for one in message.tensors:
            if one.dtype not in _NAMES or one.layout is not torch.strided:
                raise ProtocolError(
                    f"a tensor of {one.dtype} and layout {one.layout} cannot travel "
                    f"between stages; expected a dense one of {', '.join(_DTYPES)}"
                )
        self.on_device = on_device
        self.tensors = tuple(one.detach() for one in message.tensors)
        self.head: bytes = msgpack.packb(
            [
                [[_NAMES[one.dtype], list(one.shape)] for one in self.tensors],
                message.structure,
                message.needs_grad,
                on_device,
            ]
        )

    def frames(self, tag: int) -> list[torch.Tensor]:
        """Tensors of gloo that carry tag and head."""
        raw = _START.pack(tag, len(self.head)) + self.head
        first, rest = raw[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0"), raw[FRAME_BYTES:]
        pieces = [first, rest] if rest else [first]
        return [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in pieces]


def read_frame(frame: torch.Tensor) -> tuple[int, bytes, int]:
    """The tag, the part of the head in a frame, and the bytes of it that follow."""
    raw = frame.numpy().tobytes()
    tag, length = _START.unpack_from(raw)
    head = raw[_START.size : _START.size + length]
    return int(tag), head, length - len(head)


def read_head(head: bytes) -> tuple[Message, bool]:
    """The message with empty tensors, and whether they come from device to device.

    Those that do have shapes only.

    Raises:
        ProtocolError: it is no description of a message.
    """
    try:
        described, structure, needs_grad, on_device = msgpack.unpackb(head)
        place = "meta" if on_device else "cpu"
        tensors = tuple(
            torch.empty(shape, dtype=_DTYPES[name], device=place)
            for name, shape in described
        )
        return Message(tensors, structure, tuple(needs_grad)), on_device
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"expected the head of a message, got {head[:40]!r}"
        ) from error
