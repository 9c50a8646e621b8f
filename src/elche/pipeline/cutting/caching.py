"""Caches of keys and values in the layers of a cut transformers model.

The model is traced a second time with a past of any length, because the code between
blocks (positions, masks) depends on it. The blocks receive transformers' own cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.cutting.arguments import Arguments
from elche.pipeline.setup.pretrained import is_pretrained

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of forward's argument for keys and values: since version 5.24, and before."""
MASK_ARGUMENT = "attention_mask"
PAST = "past_key_values"
"""Name of a layer's cache in `Pipeline.generate`, for every model."""
PAST_LENGTH = 3
"""Past length during the trace; 0 or 1 would not stay symbolic in torch."""
CACHE_MARK = "elche: the cache"
"""Placeholder in a trace for the cache that a module receives."""


def takes_cache(model: nn.Module) -> bool:
    """True if a model's forward accepts a cache of transformers."""
    return is_pretrained(model) and bool(_name(inspect.signature(model.forward)))


def _name(signature: inspect.Signature) -> str:
    """Name of forward's cache argument; "" without one."""
    return next((one for one in CACHE_ARGUMENTS if one in signature.parameters), "")


def cached_arguments(
    model: nn.Module, sample: Any, device: torch.device, omitted: Collection[str]
) -> Arguments:
    """Arguments of a sample that follows a past; a tensor carries the past's length."""
    read = Arguments.read(model, sample, torch.device("cpu"), omitted)
    given = read.filled(read.tensors)
    if "use_cache" in read.signature.parameters:
        given["use_cache"] = False  # else it returns the cache
    if given.get(MASK_ARGUMENT) is not None:
        given[MASK_ARGUMENT] = F.pad(given[MASK_ARGUMENT], (PAST_LENGTH, 0), value=1)
    given[_name(read.signature)] = _past(PAST_LENGTH)
    return Arguments.read(model, given, device)


def traced_forward(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    """Traced logits, with a cache that has a length but no content."""
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


def after_past(
    arguments: Arguments | None,
    values: Sequence[Any],
    keywords: dict[str, Any],
    cache: dict[str, Any],
) -> list[Any]:
    """Inputs of a layer's code; the last one is its cache of keys and values."""
    if PAST not in cache:
        cache[PAST], cache["length"] = _dynamic_cache(), 0
    if arguments is not None:
        past = {_name(arguments.signature): _past(cache["length"])}
        found = arguments.tensors_of(values, {**keywords, **past})
        values = [one.to(found[0].device) for one in found]
        cache["length"] += found[0].shape[1]
    return [*values, cache[PAST]]


def _dynamic_cache() -> Any:
    return import_module("transformers").DynamicCache()


def _past(length: int) -> torch.Tensor:
    """Tensor as long as the past, so that its length can be sent between stages."""
    return torch.empty(length, dtype=torch.uint8, device="cpu")
