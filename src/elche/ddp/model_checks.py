"""Checks of the model: across ranks when it is wrapped, and before a forward pass."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.comm.tensors.unshareable import difference, model_layout, unshareable_module
from elche.comm.transport.exchange import agree_to_share
from elche.comm.transport.process_group import gather_values
from elche.comm.transport.shared_memory import may_share_memory
from elche.config_checks import check_choice
from elche.ddp.group import TorchGroup
from elche.errors import ConfigError, MismatchError

MIB = 2**20
LEAST_CAP_MB, MOST_CAP_MB = 2.0, 25.0
BUCKETS_AIMED_AT = 16
_IN_ORDER = "leave it out: buckets are sent in the order in which gradients appear"
REFUSED = {
    "codec": "compress gradients by register_comm_hook and a hook of torch's "
    "(ddp_comm_hooks.default_hooks.bf16_compress_hook, say), or train with "
    "elche.setup(..., codec=...)",
    "delay_all_reduce_named_params": _IN_ORDER,
    "device_mesh": "give process_group=mesh.get_group()",
    "mixed_precision": "run the model under torch.autocast",
    "param_to_hook_all_reduce": _IN_ORDER,
}
"""Arguments that are refused unless they are off, with the alternative to each."""
CHOICES = {
    "loss_reduction": ("mean", "sum"),
    "weight_by": ("samples", "ranks"),
    "strategy": ("overlapped", "synchronous", "none"),
    "transport": ("auto", "gloo"),
}


def refuse_arguments(given: dict[str, Any]) -> None:
    """Removes unsupported arguments; raises ConfigError if one of them is set."""
    for name, instead in REFUSED.items():
        value = given.pop(name, None)
        asks_nothing = value is None or value is False
        if not asks_nothing and (name, value) != ("codec", "fp32"):
            raise ConfigError(
                f"elche.DistributedDataParallel has no argument {name}; {instead}"
            )


def cap_mb(model: nn.Module) -> float:
    """Default bucket capacity (MiB): small enough to overlap, in few messages."""
    size = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    return min(MOST_CAP_MB, max(LEAST_CAP_MB, size / MIB / BUCKETS_AIMED_AT))


def compare(
    group: TorchGroup,
    model: nn.Module,
    ignored: frozenset[str],
    settings: Mapping[str, Any],
) -> None:
    """Compares model layouts and settings across ranks, but not values; collective.

    A rank whose model cannot be reduced sends its error, so that all ranks raise
    instead of waiting for it. If all ranks compute on the CPU of one host, they then
    agree to share memory and watch each other's processes.

    Args:
        group: process group of all ranks.
        model: model to be wrapped.
        ignored: names of parameters and buffers that stay local.
        settings: the wrapper's arguments by name.

    Raises:
        ConfigError: a rank has a tensor or layer that cannot be reduced.
        MismatchError: ranks differ; the message names the difference.
        CommunicationError: a rank did not arrive in time.
    """
    for name, choices in CHOICES.items():
        check_choice(name, settings[name], choices)
    cap = settings["bucket_cap_mb"]
    if cap is not None and not 0 <= cap < math.inf:
        raise ConfigError(f"expected bucket_cap_mb of 0 or more, got {cap!r}")
    kinds = {parameter.device.type for parameter in model.parameters()}
    own: dict[str, Any] = {
        "device": " and ".join(sorted(kinds)),
        "pid": os.getpid(),
        "problem": "",
    }
    try:
        own["found"] = _found(model, ignored, settings)
    except ConfigError as error:
        own["problem"] = str(error)
    ranks = gather_values(group, own, "comparing the ranks")
    for rank, each in enumerate(ranks):
        if each["problem"]:
            raise ConfigError(f"on rank {rank}: {each['problem']}")
    if differing := difference([each["found"] for each in ranks]):
        raise MismatchError(
            f"ranks differ in what they would reduce: {differing}; build the same "
            "model with the same arguments on every rank"
        )
    devices = {each["device"] for each in ranks}
    group.is_mixed = len(devices) > 1
    on_cpu = devices == {"cpu"} and settings["transport"] == "auto"
    group.shares_host = agree_to_share(group, on_cpu and may_share_memory())
    if len(set(group.hosts())) == 1:  # a process ID means nothing on another host
        group.pids = tuple(each["pid"] for each in ranks)


def _found(
    model: nn.Module, ignored: frozenset[str], settings: Mapping[str, Any]
) -> dict[str, str]:
    """Returns settings and model layout by name.

    Raises:
        ConfigError: the model cannot be reduced.
    """
    if fault := unshareable_module(model):
        raise ConfigError(fault)
    norms = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    if norms and settings["weight_by"] == "samples":
        raise ConfigError(
            "torch.nn.SyncBatchNorm weighs ranks equally in its backward pass; call "
            "elche.convert_sync_batchnorm(model) before wrapping, or give "
            "weight_by='ranks'"
        )
    found = {f"option {name}": repr(value) for name, value in settings.items()}
    found["option SyncBatchNorm"] = repr(list(sync_batchnorm_layers(model)))
    return {**found, **model_layout(model, ignored)}


def refuse_converted(
    trained: Mapping[str, nn.Parameter], dtypes: Sequence[torch.dtype]
) -> None:
    """Raises ConfigError if a parameter's dtype has changed since wrapping."""
    for (name, parameter), dtype in zip(trained.items(), dtypes, strict=True):
        if parameter.dtype is not dtype:
            raise ConfigError(
                f"{name} was {dtype} when the model was wrapped and is "
                f"{parameter.dtype} now; convert it before wrapping the model"
            )


def refuse_changes(
    group: TorchGroup,
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    ignored: frozenset[str],
) -> None:
    """Refuses a model whose trained parameters are not those that are reduced.

    Parameters that pruning or a parametrization has moved to another name are still
    reduced.

    Args:
        group: process group of all ranks.
        model: wrapped model in its present state.
        trained: reduced parameters by their names at wrapping.
        ignored: names of parameters that stay local.

    Raises:
        ConfigError: names such a parameter, or a SyncBatchNorm layer without a group.
    """
    held = {id(parameter) for parameter in model.parameters()}
    reduced = {id(parameter) for parameter in trained.values()}
    for name, parameter in trained.items():
        if id(parameter) not in held:
            raise ConfigError(
                f"{name} was replaced after the model was wrapped, so its gradient "
                "would not be reduced; assign to its .data, or wrap the model again"
            )
    for name, parameter in model.named_parameters():
        is_reduced = id(parameter) in reduced or name in ignored
        if parameter.requires_grad and not is_reduced:
            raise ConfigError(
                f"{name} was frozen when the model was wrapped, or not there, so its "
                "gradient would not be reduced; wrap the model again"
            )
    for name, layer in sync_batchnorm_layers(model).items():
        if group.world_size > 1 and not layer.spans_ranks:
            raise ConfigError(
                f"BatchNorm layer {name!r} was converted after the model was wrapped, "
                "and does not take part in the group; convert before wrapping"
            )
