"""The buffers of a model that can be averaged: those that all ranks hold alike.

A cache that grows with the longest sequence seen (rotary embeddings) is registered anew
in the forward pass, on each rank when its batches ask for it. Ranks that sent what they
have then would send messages of other lengths, which ends gloo's processes. So whenever
messages are laid out, ranks agree on what all of them hold in one form
(:meth:`KnownBuffers.agree`), and a rank that holds it otherwise later says so in the
message. What is not held alike is each rank's own.
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
"""Buffers of a model that were logged already: once is enough."""


@dataclass(frozen=True, slots=True)
class BufferKind:
    """Shape and dtype of a buffer when messages were laid out.

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
        """True if it becomes a mean; else it counts."""
        kind = self.dtype
        return kind == torch.bool or kind.is_floating_point or kind.is_complex

    def is_like(self, other: BufferKind) -> bool:
        """True if a message has the same room for both; their precision may differ."""
        mine, theirs = (
            (kind.shape, kind.dtype.is_complex, kind.is_averaged)
            for kind in (self, other)
        )
        return mine == theirs


@final
class KnownBuffers:
    """A model's buffers by numbers that mean the same on all ranks.

    Until :meth:`agree` they are this rank's, in its own order. Buffers that the model
    gets later have no number.

    Args:
        model: the model; its present buffers are looked up at every call.

    Attributes:
        kinds: of each buffer.
        numbers: of buffers, by name.
        own: numbers of those that are each rank's own by now.
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
        """Keeps what all ranks hold alike, in rank 0's order; with all of them.

        Raises:
            CommunicationError: a rank did not come in time.
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
        """These are each rank's own from now on."""
        new = set(numbers) - self.own
        self.own |= new
        names = list(self.numbers)
        self._name(names[number] for number in sorted(new))

    def common(self) -> list[tuple[int, BufferKind, torch.Tensor]]:
        """Numbers, kinds and present values of those that this rank holds as all do."""
        pairs = enumerate(zip(self.kinds, self.present(), strict=True))
        return [(i, kind, buffer) for i, (kind, buffer) in pairs if buffer is not None]

    def _know(self, kinds: Mapping[str, BufferKind]) -> None:
        self.numbers = {name: number for number, name in enumerate(kinds)}
        self.kinds = list(kinds.values())

    def _name(self, names: Iterable[str]) -> None:
        """Logs once per buffer that its form differs between ranks."""
        told = _named.setdefault(self._model, set())
        new = [name for name in dict.fromkeys(names) if name not in told]
        if new:
            _log.info("buffers %s: each rank keeps its own", ", ".join(new))
        told.update(new)

    def name_means(
        self, own: Mapping[int, torch.Tensor], means: Mapping[int, torch.Tensor]
    ) -> None:
        """Warns once of buffers that ranks wrote differently, by their numbers."""
        told = _named.setdefault(self._model, set())
        norms, present = norm_buffers(self._model), self.present()
        found = "means" not in told and [
            repr(name)
            for number, name in enumerate(self.numbers)
            if number in own.keys() & means.keys()
            and id(present[number]) not in norms
            and not torch.allclose(
                own[number].double(), means[number].double(), equal_nan=True
            )
        ]
        if found:
            told.add("means")
            _log.warning(
                "elche: buffers that forward passes write (%s) become the mean of what "
                "each rank makes of its share, and integers stay a rank's own; "
                "elche.all_gather(...) of what they are made of makes them those of "
                "the whole batch, as on one device",
                ", ".join(found),
            )

    def present(self) -> list[torch.Tensor | None]:
        """The buffers as they are now; None for one that is no more, or is resized."""
        buffers: list[torch.Tensor | None] = [None] * len(self.kinds)
        for name, buffer in self._model.named_buffers():
            number = self.numbers.get(name)
            now = BufferKind(buffer.shape, buffer.dtype)
            if number is not None and self.kinds[number].is_like(now):
                buffers[number] = buffer
        return buffers

    def numbers_of(self, places: list[int]) -> set[int]:
        """Numbers of buffers, given their places in ``model.buffers()``."""
        names = [name for name, _ in self._model.named_buffers()]
        found = (self.numbers.get(names[place]) for place in places)
        return {number for number in found if number is not None}


def shared_tensors(model: nn.Module, group: Group) -> list[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that all ranks hold alike; with all of them."""
    known = KnownBuffers(model)
    known.agree(group)
    names = list(known.numbers)
    buffers = [(names[number], buffer) for number, _, buffer in known.common()]
    return [*model.named_parameters(), *buffers]


def norm_buffers(model: nn.Module, *, is_training: bool = False) -> set[int]:
    """Ids of the buffers of norm layers, or only of those in training mode."""
    layers = [each for each in model.modules() if isinstance(each, NormBase)]
    used = [each for each in layers if each.training or not is_training]
    return {id(buffer) for layer in used for buffer in layer.buffers(recurse=False)}


def _read(text: str) -> dict[str, BufferKind]:
    return {
        name: BufferKind(torch.Size(shape), getattr(torch, dtype))
        for name, (shape, dtype) in json.loads(text).items()
    }


def _common(ranks: Sequence[Mapping[str, BufferKind]]) -> dict[str, BufferKind]:
    """Buffers that all ranks have alike, each in a precision that is enough for all."""
    common = {}
    for name, kind in ranks[0].items():
        if not all(name in each and each[name].is_like(kind) for each in ranks):
            continue
        dtype = kind.dtype
        for each in ranks[1:]:
            dtype = torch.promote_types(dtype, each[name].dtype)
        common[name] = BufferKind(kind.shape, dtype)
    return common
