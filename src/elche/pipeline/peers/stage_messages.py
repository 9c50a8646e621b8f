"""Messages between stages: tensors with their shapes, structure, and failures.

A message is a head of fixed size, which says what follows, and one message per tensor.
A head that needs more room is followed by the rest of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from elche.errors import ProtocolError

HEAD_BYTES = 512
NO_STEP_TAGS = 1 << 26
"""Tags from here on are of messages between steps, which go through the host."""
_LENGTH = struct.Struct("<I")
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
class Failure:
    """Why a rank cannot go on with a step.

    Attributes:
        rank: which one.
        text: its error.
        traceback: of it.
    """

    rank: int
    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One activation or gradient, or the notification that there is none.

    Attributes:
        tensors: on the sender's device; of the receiver, on the CPU, or on its device
            if they came that way.
        structure: how they are nested, see `elche.pipeline.trees`.
        needs_grad: per tensor, whether a gradient is to come back; in a message of
            gradients whether it is there.
        failure: set when the sender has failed.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    structure: Any = None
    needs_grad: tuple[bool, ...] = ()
    failure: Failure | None = field(default=None)


def head_of(message: Message, on_device: bool = False) -> bytes:
    """The description of a message, msgpack.

    Args:
        message: what is to be sent.
        on_device: whether its tensors go from device to device.

    Raises:
        ProtocolError: a tensor is of a kind that does not travel.
    """
    described = []
    for tensor in message.tensors:
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise ProtocolError(
                f"a tensor of {tensor.dtype} and layout {tensor.layout} cannot travel "
                f"between stages; expected a dense one of {', '.join(_DTYPES)}"
            )
        described.append([_NAMES[tensor.dtype], list(tensor.shape)])
    failure = message.failure
    packed: bytes = msgpack.packb(
        {
            "tensors": described,
            "structure": message.structure,
            "needs_grad": list(message.needs_grad),
            "failure": failure and [failure.rank, failure.text, failure.traceback],
            "on_device": on_device,
        }
    )
    return packed


@dataclass(frozen=True, slots=True)
class Head:
    """What a head announces: empty tensors to receive into, and the rest.

    Those that come from device to device have shapes only.
    """

    buffers: tuple[torch.Tensor, ...]
    structure: Any
    needs_grad: tuple[bool, ...]
    failure: Failure | None
    on_device: bool


def read_head(packed: bytes) -> Head:
    """Reads a description.

    Raises:
        ProtocolError: it is none.
    """
    try:
        told = msgpack.unpackb(packed)
        place = "meta" if told["on_device"] else "cpu"
        return Head(
            buffers=tuple(
                torch.empty(shape, dtype=_DTYPES[name], device=place)
                for name, shape in told["tensors"]
            ),
            structure=told["structure"],
            needs_grad=tuple(told["needs_grad"]),
            failure=Failure(*told["failure"]) if told["failure"] else None,
            on_device=told["on_device"],
        )
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"expected the head of a message, got {packed[:40]!r}"
        ) from error


def head_tensors(packed: bytes) -> list[torch.Tensor]:
    """The messages that carry a head: one of fixed size, and one more if need be."""
    first = bytearray(HEAD_BYTES)
    first[: _LENGTH.size] = _LENGTH.pack(len(packed))
    room = HEAD_BYTES - _LENGTH.size
    if len(packed) <= room:
        first[_LENGTH.size : _LENGTH.size + len(packed)] = packed
        return [torch.frombuffer(first, dtype=torch.uint8)]
    rest = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return [torch.frombuffer(first, dtype=torch.uint8), rest]


def head_length(first: torch.Tensor) -> int:
    """Length of the head in the message of fixed size."""
    (length,) = _LENGTH.unpack(bytes(first[: _LENGTH.size].tolist()))
    return int(length)


def head_within(first: torch.Tensor, length: int) -> bytes | None:
    """The head itself if it had room in the message of fixed size."""
    if length > HEAD_BYTES - _LENGTH.size:
        return None
    return bytes(first[_LENGTH.size : _LENGTH.size + length].numpy())
