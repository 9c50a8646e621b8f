"""Comparison of the ranks' models and settings before they are wrapped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.comm.tensors.unshareable import unshareable_module, why_unshareable
from elche.comm.transport.exchange import agree_to_share, can_share
from elche.comm.transport.process_group import gather_texts
from elche.ddp.group import TorchGroup
from elche.errors import ConfigError, MismatchError

SHOWN_DIFFERENCES = 5


def compare(
    group: TorchGroup,
    model: nn.Module,
    ignored: frozenset[str],
    settings: Mapping[str, Any],
) -> None:
    """Compares everything that must be the same on every rank, but values.

    What cannot be reduced is sent as a problem, so that all ranks raise instead of
    waiting for the one that has it. Ranks that all compute on the CPU of one host then
    share memory, and watch each other's processes.

    Args:
        group: all ranks, which call this together.
        model: the model.
        ignored: names of parameters and buffers that stay local.
        settings: of the wrapper.

    Raises:
        ConfigError: a rank has something that cannot be reduced.
        MismatchError: ranks differ; the message names the difference.
        CommunicationError: ranks did not come together.
    """
    kinds = {parameter.device.type for parameter in model.parameters()}
    problem = _problem(model, ignored, settings["weight_by"])
    own = {
        "problem": problem,
        "device": " and ".join(sorted(kinds)),
        "pid": os.getpid(),
        "found": {} if problem else _found(model, ignored, settings),
    }
    ranks = [
        json.loads(text)
        for text in gather_texts(group, json.dumps(own), "comparing the ranks")
    ]
    for rank, each in enumerate(ranks):
        if each["problem"]:
            raise ConfigError(f"on rank {rank}: {each['problem']}")
    for rank, each in enumerate(ranks):
        _refuse_differences(rank, each["found"], ranks[0]["found"])
    devices = {each["device"] for each in ranks}
    group.is_mixed = len(devices) > 1
    on_cpu = devices == {"cpu"} and settings["transport"] == "auto"
    group.shares_host = agree_to_share(group, on_cpu and can_share("CPU"))
    group.watch([each["pid"] for each in ranks])


def _found(
    model: nn.Module, ignored: frozenset[str], settings: Mapping[str, Any]
) -> dict[str, str]:
    """Settings and layouts by name."""
    found = {f"option {name}": repr(value) for name, value in settings.items()}
    found["option SyncBatchNorm"] = repr(list(sync_batchnorm_layers(model)))
    for at, (name, parameter) in enumerate(_kept(model.named_parameters(), ignored)):
        trained = "trained" if parameter.requires_grad else "frozen"
        found[f"parameter {name}"] = f"{_layout(parameter)} {trained}"
        found[f"place {at}"] = name
    for name, buffer in _kept(model.named_buffers(), ignored):
        found[f"buffer {name}"] = _layout(buffer)
    return found


def _refuse_differences(
    rank: int, found: dict[str, str], first: dict[str, str]
) -> None:
    differing = [
        name for name in sorted({*first, *found}) if first.get(name) != found.get(name)
    ]
    names = [name for name in differing if not name.startswith("place ")] or differing
    if names:
        lines = [
            f"{name}: rank 0 has {first.get(name, 'none')}, "
            f"rank {rank} has {found.get(name, 'none')}"
            for name in names[:SHOWN_DIFFERENCES]
        ]
        if len(names) > SHOWN_DIFFERENCES:
            lines.append(f"and {len(names) - SHOWN_DIFFERENCES} more")
        raise MismatchError(
            "ranks differ in what they would reduce: "
            + "; ".join(lines)
            + "; build the same model with the same arguments on every rank"
        )


def _kept(named: Any, ignored: frozenset[str]) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in named if name not in ignored]


def _layout(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    contiguous = tensor.is_contiguous()
    strides = "" if contiguous else f" strides {list(tensor.stride())}"
    return f"{list(tensor.shape)} {dtype}{strides}"


def _problem(model: nn.Module, ignored: frozenset[str], weight_by: str) -> str:
    """Reason why the model cannot be reduced, or ""."""
    parameters = _kept(model.named_parameters(), ignored)
    if fault := unshareable_module(model):
        return fault
    norms = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    if norms and weight_by == "samples":
        return (
            "torch.nn.SyncBatchNorm weighs all ranks alike in its backward pass; call "
            "elche.convert_sync_batchnorm(model) before wrapping, or give "
            "weight_by='ranks'"
        )
    tensors = parameters + _kept(model.named_buffers(), ignored)
    found = (f"{name} {why}" for name, t in tensors if (why := why_unshareable(t)))
    return next(found, "")
