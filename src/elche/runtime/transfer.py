"""Batches to the device."""

from __future__ import annotations

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
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(item, device) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(item, device) for item in data)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device) for key, value in data.items()}
        return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    if hasattr(data, "to") and callable(data.to):
        return data.to(device)
    return data
