"""Caches of keys and values in the layers of a cut model of transformers.

Its forward is traced a second time, with a past of any length, since the code between
the blocks (positions, masks) depends on it. The blocks receive transformers' own cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib import import_module
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.cutting.arguments import Arguments
from elche.pipeline.setup.pretrained import is_pretrained

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of forward's argument for keys and values: since 5.24, and before."""
MASK_ARGUMENT = "attention_mask"
PAST = "past_key_values"
"""Name of a layer's cache in `Pipeline.generate`, whatever the model calls it."""
PAST_LENGTH = 3
"""Past length in the trace, where it is a symbol; torch would fix 0 and 1."""
CACHE_MARK = "elche: the cache"
"""Placeholder in a trace for the cache that a module receives."""


def takes_cache(model: nn.Module) -> bool:
    """True if a model's forward accepts a cache of transformers."""
    return is_pretrained(model) and bool(_name(inspect.signature(model.forward)))


def _name(signature: inspect.Signature) -> str:
    """The model's name of the cache; "" if it takes none."""
    return next((one for one in CACHE_ARGUMENTS if one in signature.parameters), "")


def cached_arguments(
    model: nn.Module, sample: Any, device: torch.device, omitted: Collection[str]
) -> Arguments:
    """Arguments of a sample after a past, whose length is given by a tensor.

    Args:
        model: model that accepts a cache.
        sample: sample that the model was cut with.
        device: device of the trace.
        omitted: arguments of the sample that are None.
    """
    read = Arguments.read(model, sample, torch.device("cpu"), omitted)
    given = read.filled(read.tensors)
    if "use_cache" in read.signature.parameters:
        given["use_cache"] = False  # else it returns the cache
    if given.get(MASK_ARGUMENT) is not None:
        given[MASK_ARGUMENT] = F.pad(given[MASK_ARGUMENT], (PAST_LENGTH, 0), value=1)
    given[_name(read.signature)] = _past(PAST_LENGTH)
    return Arguments.read(model, given, device)


def traced_forward(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    """Traced logits, with a cache of which only the length is known.

    Args:
        model: model with fake tensors.
        given: see `cached_arguments`, with the trace's tensors.
    """
    name = _name(inspect.signature(model.forward))
    past = given[name].shape[0]
    cache = _dynamic_cache()

    def update(
        keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        is_real = type(keys) is torch.Tensor  # see `StandIns.computed`
        length = keys.shape[-2] + (cache.real_past_length if is_real else past)
        return tuple(
            one.new_zeros((*one.shape[:-2], length, one.shape[-1]))
            for one in (keys, values)
        )

    cache.past_length = past
    cache.update = update
    cache.get_seq_length = lambda layer_idx=0: past
    cache.get_mask_sizes = lambda length, layer_idx=0: (past + length, 0)
    cache.traced_as = CACHE_MARK
    found = model(**{**given, name: cache})
    logits: torch.Tensor = getattr(found, "logits", found[0])
    return logits


@final
class CachedSegment(nn.Module):
    """A layer of a cut model that accepts `cache=` from `Pipeline.generate`.

    Args:
        part: part of the model's forward, whose last argument is the cache.
        arguments: arguments of the model's trace, if this is its first part.
    """

    def __init__(self, part: nn.Module, arguments: Arguments | None) -> None:
        super().__init__()
        self.part = part
        self._arguments = arguments

    def forward(self, *values: Any, cache: dict[str, Any], **keywords: Any) -> Any:
        """Runs the part on new positions, which follow those in the cache."""
        if PAST not in cache:
            cache[PAST], cache["length"] = _dynamic_cache(), 0
        given: Any = values
        if self._arguments is not None:
            keywords[_name(self._arguments.signature)] = _past(cache["length"])
            found = self._arguments.tensors_of(values, keywords)
            given = [one.to(found[0].device) for one in found]
            cache["length"] += given[0].shape[1]
        return self.part(*given, cache[PAST])


def _dynamic_cache() -> Any:
    return import_module("transformers").DynamicCache()


def _past(length: int) -> torch.Tensor:
    """A tensor of the past's length, which can be sent between stages."""
    return torch.empty(length, dtype=torch.uint8, device="cpu")
