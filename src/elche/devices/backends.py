"""Backends of torch.distributed that sum the devices' own tensors."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from elche.devices import choice
from elche.torch_internals.groups import (
    has_backend,
    native_group,
    registered_backend,
)


def own_backend(device: torch.device) -> str:
    """Backend that sums a device's tensors without the host; "" if there is none."""
    try:
        name = dist.get_default_backend_for_device(device)
    except ValueError:
        return ""
    is_here = {"nccl": dist.is_nccl_available(), "xccl": dist.is_xccl_available()}
    return name if is_here.get(name) or registered_backend(name) else ""


def place_of(device: torch.device) -> str:
    """Backend and unique name of a device on its host; "" if it has no backend.

    With CUDA_VISIBLE_DEVICES, one device may have another index in each process.
    """
    backend = own_backend(device)
    find = getattr(choice.module_of(device.type), "get_device_properties", None)
    properties: Any = None if find is None or not backend else find(device)
    return backend and f"{backend} {getattr(properties, 'uuid', device.index)}"


def form_group(
    device: torch.device, store: dist.Store, rank: int, size: int, deadline: timedelta
) -> Any:
    """Forms a group of a device's own backend among processes that share a store.

    NCCL's watchdog calls the store from other threads, so it must be a torch store.
    """
    name = own_backend(device)
    create = registered_backend(name) or partial(native_group, name)
    return create(store, rank, size, deadline)


def gloo_takes(tensor: torch.Tensor) -> bool:
    """True if gloo sums tensors of this device, possibly through the host."""
    return tensor.device.type in dist.Backend.backend_capability["gloo"]


def control_device(process_group: Any) -> torch.device:
    """Device of small messages in a user's process group: the CPU if it can be."""
    on_host = has_backend(process_group, choice.CPU)
    return choice.CPU if on_host else choice.current_device()
