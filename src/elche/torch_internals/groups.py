"""Private names of process groups and of DDP, and attributes that torch reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from elche.torch_internals.lookup import bind


def gloo_options(timeout: timedelta, listen: str) -> Any:
    """Options of a gloo group whose sockets listen on the address `listen`."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=listen)]
    options._threads = 2
    return options


def native_group(
    name: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> Any:
    """Makes a group of torch's own backend ``nccl`` or ``xccl``."""
    kind: Any = getattr(dist, f"ProcessGroup{name.upper()}")
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options)


def registered_backend(name: str) -> Callable[..., Any] | None:
    """Constructor of an extension's groups; None without a backend of the plain API."""
    plugin: Any = dist.Backend._plugins.get(name.upper())
    return None if plugin is None or plugin.extended_api else plugin.creator_fn


def has_backend(process_group: Any, device: torch.device) -> bool:
    """True if a process group takes tensors of this type of device."""
    try:
        process_group._get_backend(device)
    except RuntimeError:
        return False
    return True


def group_timeout_s(process_group: Any) -> float | None:
    """Timeout (s) of a user's process group; None if torch does not expose it."""
    for device in process_group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            options = process_group._get_backend(device).options
            return float(options._timeout.total_seconds())
    return None


_ORDER = "orders buckets as gradients appear"
_JOIN = "reduces without a backward pass"
rebuild_buckets: Callable[[Any], bool] = bind(
    "torch.distributed.Reducer._rebuild_buckets", _ORDER
)
zero_buckets: Callable[[Any], list[Any]] = bind(
    "torch.distributed.Reducer._get_zeros_like_grad_buckets", _JOIN
)
push_all_rebuilt: Callable[[Any], None] = bind(
    "torch.distributed.Reducer._push_all_rebuilt_params", _JOIN
)

default_store: Callable[[], Any] = bind(
    "torch.distributed.distributed_c10d._get_default_store",
    "finds the store of a default process group that exists already",
)

# Attributes that torch reads from elche's objects; whether it still does is unchecked.

COMM_HOOKS = "_comm_hooks"
"""DDP attribute with the registered hooks; cleared in a copy."""

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Module attribute with names of tensors that DDP and elche's wrapper ignore."""

STEPPED_IN_BACKWARD = "_in_backward_optimizers"
"""Attribute of a parameter with an optimizer in backward, which elche refuses."""

COMPILED_MODULE = "_orig_mod"
"""Attribute of a compiled module that holds the original; a prefix in state dicts."""
