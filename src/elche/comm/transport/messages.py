"""Messages from rank to rank: tensors with shapes and structure.

Through gloo, a message is a frame of fixed size with tag and head, and then the
tensors. If the head does not fit the frame, the rest follows the frame.
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
"""Lowest tag of messages between steps; messages of steps have smaller tags."""
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
        tensors: tensors on the sender's device; at the receiver on the CPU, or on its
            device if they were sent from device to device.
        structure: nesting of the tensors, or any value that msgpack can write.
        needs_grad: per tensor, True if a gradient must be returned; in a message of
            gradients, True if the gradient is present.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    structure: Any = None
    needs_grad: tuple[bool, ...] = ()


@final
class Packed:
    """A message ready to be sent.

    Args:
        message: message to send.
        on_device: True if its tensors are sent from device to device.

    Attributes:
        head: description of the message in msgpack.
        tensors: detached tensors of the message.

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
        """Returns byte tensors for gloo with tag and head."""
        raw = _START.pack(tag, len(self.head)) + self.head
        first, rest = raw[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0"), raw[FRAME_BYTES:]
        pieces = [first, rest] if rest else [first]
        return [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in pieces]


def read_frame(frame: torch.Tensor) -> tuple[int, bytes, int]:
    """Returns the tag, the head's bytes in the frame, and the count of missing ones."""
    raw = frame.numpy().tobytes()
    tag, length = _START.unpack_from(raw)
    head = raw[_START.size : _START.size + length]
    return int(tag), head, length - len(head)


def read_head(head: bytes) -> tuple[Message, bool]:
    """Returns the message with empty tensors; True if sent from device to device.

    Tensors sent from device to device are meta tensors.

    Raises:
        ProtocolError: the bytes are not a message's head.
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
