"""Batches to the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch


def to_device(data: Any, device: torch.device) -> Any:
    """Moves every tensor in a batch, whatever containers it has.

    Containers that are not tuples, lists, mappings or objects with ``.to`` are handed
    on as they are.
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=data.device.type == "cpu")
    if hasattr(data, "to") and callable(data.to):
        return data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(item, device) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(item, device) for item in data)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device) for key, value in data.items()}
        if type(data) is dict or not hasattr(data, "update"):
            return moved
        same = copy.copy(data)
        same.update(moved)
        return same
    return data


def batch_length(batch: Any) -> int:
    """Samples of a batch: the leading dimension of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            length = batch_length(part)
            if length:
                return length
    return 0
