"""The buffers of a model that can be averaged: those of one form on all ranks.

A cache that grows with the longest sequence (rotary embeddings) is registered again in
the forward pass, on each rank when its batches need it. Ranks would then send messages
of different lengths, which crashes gloo's processes. So ranks agree on the buffers of
one form when messages are laid out (:meth:`KnownBuffers.agree`). A rank whose buffer
changes form later sets a flag in the message. Buffers of different forms stay local.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elche.comm.transport.process_group import Group, gather_texts
from elche.torch_internals.held import NormBase

AGREEING = "agreeing on buffers"

_log = logging.getLogger(__name__)
_named: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Names of buffers already logged, by model, to log each once."""


@dataclass(frozen=True, slots=True)
class BufferKind:
    """Shape and dtype of a buffer when messages were laid out.

    Attributes:
        shape: shape of the buffer.
        dtype: dtype of the buffer.
    """

    shape: torch.Size
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of real elements; a complex element counts as two."""
        return self.shape.numel() * (2 if self.dtype.is_complex else 1)

    @property
    def is_averaged(self) -> bool:
        """True if the buffer is averaged; False for a counter."""
        kind = self.dtype
        return kind == torch.bool or kind.is_floating_point or kind.is_complex

    def is_like(self, other: BufferKind) -> bool:
        """True if both need the same space in a message; precision may differ."""
        mine, theirs = (
            (kind.shape, kind.dtype.is_complex, kind.is_averaged)
            for kind in (self, other)
        )
        return mine == theirs


@final
class KnownBuffers:
    """A model's buffers under numbers that all ranks agree on.

    Until :meth:`agree`, the numbers are this rank's own. Buffers that the model gets
    later have no number.

    Args:
        model: model whose current buffers are read at every call.

    Attributes:
        kinds: shape and dtype of each buffer, by number.
        numbers: buffer numbers by name.
        own: numbers of buffers that have become local to each rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.own: set[int] = set()
        self._know(
            {
                name: BufferKind(buffer.shape, buffer.dtype)
                for name, buffer in model.named_buffers()
            }
        )

    def agree(self, group: Group) -> None:
        """Keeps the buffers of one form on all ranks, in rank 0's order; collective.

        Raises:
            CommunicationError: a rank did not arrive in time.
        """
        forms = {
            name: [list(kind.shape), str(kind.dtype).removeprefix("torch.")]
            for name, kind in zip(self.numbers, self.kinds, strict=True)
        }
        texts = gather_texts(group, json.dumps(forms), AGREEING)
        if len(set(texts)) == 1:
            return
        ranks = [_read(each) for each in texts]
        common = _common(ranks)
        self.own.clear()
        self._know(common)
        self._name(name for kinds in ranks for name in kinds if name not in common)

    def keep_own(self, numbers: Iterable[int]) -> None:
        """Marks buffers as local to each rank from now on."""
        new = set(numbers) - self.own
        self.own |= new
        names = list(self.numbers)
        self._name(names[number] for number in sorted(new))

    def common(self) -> list[tuple[int, BufferKind, torch.Tensor]]:
        """Returns number, kind and current value of each buffer of the agreed form."""
        pairs = enumerate(zip(self.kinds, self.present(), strict=True))
        return [(i, kind, buffer) for i, (kind, buffer) in pairs if buffer is not None]

    def _know(self, kinds: Mapping[str, BufferKind]) -> None:
        self.numbers = {name: number for number, name in enumerate(kinds)}
        self.kinds = list(kinds.values())

    def _name(self, names: Iterable[str]) -> None:
        """Logs once per buffer that its form differs between ranks."""
        logged = _named.setdefault(self._model, set())
        new = [name for name in dict.fromkeys(names) if name not in logged]
        if new:
            _log.info("buffers %s: each rank keeps its own", ", ".join(new))
        logged.update(new)

    def name_means(
        self, own: Mapping[int, torch.Tensor], means: Mapping[int, torch.Tensor]
    ) -> None:
        """Warns once if own values of buffers, by number, differ from the means."""
        logged = _named.setdefault(self._model, set())
        norms, present = norm_buffers(self._model), self.present()
        found = "means" not in logged and [
            repr(name)
            for number, name in enumerate(self.numbers)
            if number in own.keys() & means.keys()
            and id(present[number]) not in norms
            and not torch.allclose(
                own[number].double(), means[number].double(), equal_nan=True
            )
        ]
        if found:
            logged.add("means")
            _log.warning(
                "elche: buffers that forward passes write (%s) are averaged over "
                "ranks, and integers stay local; compute them from "
                "elche.all_gather(...) to match one device",
                ", ".join(found),
            )

    def present(self) -> list[torch.Tensor | None]:
        """Returns the current buffers; None for a removed or resized buffer."""
        buffers: list[torch.Tensor | None] = [None] * len(self.kinds)
        for name, buffer in self._model.named_buffers():
            number = self.numbers.get(name)
            now = BufferKind(buffer.shape, buffer.dtype)
            if number is not None and self.kinds[number].is_like(now):
                buffers[number] = buffer
        return buffers

    def numbers_of(self, places: list[int]) -> set[int]:
        """Returns the numbers of buffers by their places in ``model.buffers()``."""
        names = [name for name, _ in self._model.named_buffers()]
        found = (self.numbers.get(names[place]) for place in places)
        return {number for number in found if number is not None}


def shared_tensors(model: nn.Module, group: Group) -> list[tuple[str, torch.Tensor]]:
    """Returns parameters and the buffers of one form on all ranks; collective."""
    known = KnownBuffers(model)
    known.agree(group)
    names = list(known.numbers)
    buffers = [(names[number], buffer) for number, _, buffer in known.common()]
    return [*model.named_parameters(), *buffers]


def norm_buffers(model: nn.Module, *, is_training: bool = False) -> set[int]:
    """IDs of the buffers of norm layers, or only of those in training mode."""
    layers = [each for each in model.modules() if isinstance(each, NormBase)]
    used = [each for each in layers if each.training or not is_training]
    return {id(buffer) for layer in used for buffer in layer.buffers(recurse=False)}


def _read(text: str) -> dict[str, BufferKind]:
    return {
        name: BufferKind(torch.Size(shape), getattr(torch, dtype))
        for name, (shape, dtype) in json.loads(text).items()
    }


def _common(ranks: Sequence[Mapping[str, BufferKind]]) -> dict[str, BufferKind]:
    """Returns buffers of one form on all ranks, in the widest dtype of any rank."""
    common = {}
    for name, kind in ranks[0].items():
        if not all(name in each and each[name].is_like(kind) for each in ranks):
            continue
        dtype = kind.dtype
        for each in ranks[1:]:
            dtype = torch.promote_types(dtype, each[name].dtype)
        common[name] = BufferKind(kind.shape, dtype)
    return common
