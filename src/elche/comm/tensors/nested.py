"""Tensors in nested values, such as a model's inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns tensors in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in items_of(value) or () for tensor in tensors_in(item)]


def batch_length(batch: Any) -> int:
    """Batch size: the first tensor's leading dimension."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    for item in items_of(batch) or ():
        if length := batch_length(item):
            return length
    return 0


def outputs_in(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Returns the tensors of :func:`tensors_in` and those in objects' attributes."""
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
    """Returns the items of a container; None for any other value."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in dataclasses.fields(value)]
    return None
