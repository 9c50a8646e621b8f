"""Process groups, torch's wrapper, and names that torch looks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from elche.torch_internals.lookup import bind


def gloo_options(timeout: timedelta, listen: str) -> Any:
    """Options of a gloo group whose ranks listen on one address."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=listen)]
    options._threads = 2
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Options of an NCCL group."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def group_timeout_s(process_group: Any) -> float | None:
    """The deadline that a group of the user's was made with; None: not to be found."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            options = process_group._get_backend(torch.device(device)).options
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

# Names that torch looks for, in what elche hands to it. Nothing tells whether it does.

COMM_HOOKS = "_comm_hooks"
"""Attribute of torch's wrapper with the registered hooks, which a copy has not."""

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Names of a module's tensors that torch's wrapper leaves alone; elche's too."""

STEPPED_IN_BACKWARD = "_in_backward_optimizers"
"""Mark of a parameter that an optimizer steps in backward, which elche refuses."""

COMPILED_MODULE = "_orig_mod"
"""Attribute with the module that `torch.compile` was given; state dicts name it."""
