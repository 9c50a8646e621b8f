"""The buffers of a model that can be averaged: those that keep their shape.

A cache that grows with the longest sequence seen (rotary embeddings) is registered anew
in the forward pass, on each rank when its batches ask for it. Ranks that sent what they
have then would send messages of other lengths, which ends gloo's processes. So messages
are laid out for the shapes that a buffer had when it was first seen, which ranks have
compared, and a rank that holds it otherwise says so in the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elche.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class BufferKind:
    """What a buffer was when it was first seen.

    Attributes:
        shape: of it.
        dtype: of it.
    """

    shape: torch.Size
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Real numbers in it; a complex one is two."""
        return self.shape.numel() * (2 if self.dtype.is_complex else 1)

    @property
    def is_averaged(self) -> bool:
        """Whether it becomes a mean; else it counts."""
        kind = self.dtype
        return kind == torch.bool or kind.is_floating_point or kind.is_complex

    def fits(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer still is that; its precision may be another."""
        now = BufferKind(buffer.shape, buffer.dtype)
        same = (now.shape, now.dtype.is_complex) == (self.shape, self.dtype.is_complex)
        return same and now.is_averaged == self.is_averaged


_seen: WeakKeyDictionary[nn.Module, dict[str, BufferKind]] = WeakKeyDictionary()


@final
class KnownBuffers:
    """A model's buffers by numbers that mean the same on all ranks.

    What was seen of a model stays for its life, so that it is the same on ranks whose
    caches have grown apart when something is built anew. Buffers that the model has got
    since (it has grown, alike on every rank) come last.

    Args:
        model: the model; its present buffers are looked up at every call.

    Attributes:
        kinds: of each buffer, as it was first seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        seen = _seen.setdefault(model, {})
        for name, buffer in model.named_buffers():
            seen.setdefault(name, BufferKind(buffer.shape, buffer.dtype))
        self._numbers = {name: number for number, name in enumerate(seen)}
        self.kinds = list(seen.values())

    def present(self) -> list[torch.Tensor | None]:
        """The buffers as they are now; None for one that is no more, or is resized."""
        buffers: list[torch.Tensor | None] = [None] * len(self.kinds)
        for name, buffer in self._model.named_buffers():
            number = self._numbers.get(name)
            if number is not None and self.kinds[number].fits(buffer):
                buffers[number] = buffer
        return buffers

    def named(self, numbers: Iterable[int]) -> str:
        """Names of some of them, for people."""
        names = list(self._numbers)
        return ", ".join(names[number] for number in sorted(numbers))

    def numbers_of(self, places: list[int]) -> set[int]:
        """Numbers of buffers, given their places in ``model.buffers()``."""
        names = [name for name, _ in self._model.named_buffers()]
        found = (self._numbers.get(names[place]) for place in places)
        return {number for number in found if number is not None}


def held(buffer: torch.Tensor | None) -> torch.Tensor:
    """A buffer that must be there.

    Raises:
        ProtocolError: it is not.
    """
    if buffer is None:
        raise ProtocolError("expected a buffer that this rank holds, got none")
    return buffer
