"""Tensors in nested values: what a model takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in items_of(value) or () for tensor in tensors_in(item)]


def batch_length(batch: Any) -> int:
    """Samples of a batch: the leading dimension of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    for item in items_of(batch) or ():
        if length := batch_length(item):
            return length
    return 0


def outputs_in(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Tensors of :func:`tensors_in`, and those in attributes of objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    seen = set() if seen is None else seen
    items = items_of(value)
    if items is None:
        held = None if isinstance(value, nn.Module | type) else value
        items = list(getattr(held, "__dict__", {}).values())
    if id(value) in seen:
        return []
    seen.add(id(value))
    return [tensor for item in items for tensor in outputs_in(item, seen)]


def items_of(value: Any) -> Iterable[Any] | None:
    """Items of a container; None for any other value."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in dataclasses.fields(value)]
    return None
