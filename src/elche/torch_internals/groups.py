"""Process groups' options, and names that torch looks for."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from elche.torch_internals.lookup import REFUSED, has, refusing

_TIMEOUT = "torch._C._distributed_c10d.Backend.Options._timeout"
_GLOO = "torch.distributed.ProcessGroupGloo._Options"
_BACKEND = "torch.distributed.ProcessGroup._get_backend"
_HAS_TIMEOUT = has(_TIMEOUT, "2.0", "sets and reads a group's deadline", REFUSED)
_FOR_GLOO = {_TIMEOUT: _HAS_TIMEOUT} | {
    name: has(name, "2.0", "has gloo listen on one address only", REFUSED)
    for name in (_GLOO, f"{_GLOO}._devices", f"{_GLOO}._threads")
}
_HAS_BACKEND = has(
    _BACKEND,
    "2.0",
    "reads a group's deadline",
    "give DistributedDataParallel timeout_s",
)


def gloo_options(timeout: timedelta, listen: str) -> Any:
    """Options of a gloo group whose ranks listen on one address."""
    if missing := [name for name, is_there in _FOR_GLOO.items() if not is_there]:
        refusing(missing[0])()
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=listen)]
    options._threads = 2
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Options of an NCCL group."""
    if not _HAS_TIMEOUT:
        refusing(_TIMEOUT)()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def group_timeout_s(process_group: Any) -> float | None:
    """The deadline that a group of the user's was made with; None: not to be found."""
    for device in ("cpu", "cuda") if _HAS_TIMEOUT and _HAS_BACKEND else ():
        with contextlib.suppress(RuntimeError, AttributeError):
            options = process_group._get_backend(torch.device(device)).options
            return float(options._timeout.total_seconds())
    return None


# Names that torch looks for, in what elche hands to it. Nothing tells whether it does.

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Names of a module's tensors that torch's wrapper leaves alone; elche's reads it too.
Without it elche's wrapper goes on doing so. Since 2.0.
"""

STEPPED_IN_BACKWARD = "_in_backward_optimizers"
"""Mark of a parameter that `_apply_optimizer_in_backward` steps, which elche refuses.
Without it such a parameter would go unseen. Since 2.0.
"""

COMPILED_MODULE = "_orig_mod"
"""Attribute with the module that `torch.compile` was given, and so a part of the names
in its state dict. Without it a checkpoint's model has the names as they come. Since
2.0.
"""

STATE_VERSIONS = "_metadata"
"""On a module's state dict: versions of its layers' formats. Without it a checkpoint
has none, and layers load as of their first version. Since 1.0."""
