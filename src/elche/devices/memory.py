"""Memory of a device: figures, out-of-memory errors, and supported dtypes."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch

from elche.devices.choice import module_of

MPS_FULL = "MPS backend out of memory"
"""Beginning of the RuntimeError that mps raises in place of OutOfMemoryError."""


class MemoryReading(NamedTuple):
    """A device's memory, in bytes.

    Attributes:
        total_bytes: memory of the device; 0 if it is not known.
        free_bytes: memory that this process could allocate, its cache included.
        active_bytes: memory of its tensors, and freed memory in use by queued kernels.
        peak_bytes: peak of ``active_bytes``; both are 0 if they are not counted.
    """

    total_bytes: int
    free_bytes: int
    active_bytes: int = 0
    peak_bytes: int = 0


def read_memory(device: torch.device) -> MemoryReading:
    """The driver's and the caching allocator's figures of an accelerator.

    The allocator's cache, which the driver counts as used, counts as free here. Peaks
    are never reset, since the user may read them too. Does not wait for the device.
    """
    module = module_of(device.type)
    free_bytes, total_bytes = _driver_bytes(device)
    if not total_bytes:
        return MemoryReading(total_bytes, free_bytes)
    try:
        stats = getattr(module, "memory_stats", torch.accelerator.memory_stats)(device)
    except RuntimeError:  # an allocator of an extension, or a pluggable one
        return MemoryReading(total_bytes, free_bytes)
    active_bytes = stats.get("active_bytes.all.current", 0)
    reserved_bytes = stats.get("reserved_bytes.all.current", 0)
    backend = getattr(module, "get_allocator_backend", None)
    fraction_of = getattr(module, "get_per_process_memory_fraction", None)
    # cudaMallocAsync has the fraction 0 before the device's first use.
    is_native = backend is None or backend() == "native"
    fraction = fraction_of(device) if fraction_of is not None and is_native else 1.0
    allowed_bytes = max(0, int(fraction * total_bytes) - reserved_bytes)
    cached_bytes = max(0, reserved_bytes - active_bytes)
    free_bytes = min(free_bytes, allowed_bytes) + cached_bytes
    peak_bytes = stats.get("active_bytes.all.peak", 0)
    return MemoryReading(total_bytes, free_bytes, active_bytes, peak_bytes)


def total_bytes(device: torch.device) -> int:
    """Memory of a device, of the host for a CPU; 0 if it is not known."""
    if device.type != "cpu":
        return _driver_bytes(device)[1]
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _driver_bytes(device: torch.device) -> tuple[int, int]:
    """Free and total bytes as the driver reports them; 0 and 0 if it does not."""
    module = module_of(device.type)
    if device.type == "cpu":
        return 0, 0
    find = getattr(module, "mem_get_info", None)
    find = find or getattr(torch.accelerator, "get_memory_info", None)  # torch 2.10
    try:
        if hasattr(module, "recommended_max_memory"):  # mps
            total = module.recommended_max_memory()
            return max(0, total - module.driver_allocated_memory()), total
        free, total = find(device) if find is not None else (0, 0)
    except RuntimeError:
        return 0, 0
    return int(free), int(total)


def empty_cache(device: torch.device) -> None:
    """Releases the memory that torch's allocator caches."""
    if device.type != "cpu":
        getattr(module_of(device.type), "empty_cache", torch.accelerator.empty_cache)()


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device had too little memory."""
    is_full = isinstance(error, torch.OutOfMemoryError)
    return is_full or str(error).startswith(MPS_FULL)


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """Dtype of sums on a device: float64, or float32 if it has no doubles (mps)."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1.0)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64
