"""Comparison of the ranks' models before reductions, and the initial broadcast."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elche.comm.tensors.unshareable import unshareable_module, why_unshareable
from elche.comm.transport.exchange import agree_to_share, can_share
from elche.comm.transport.process_group import Group, gather_texts
from elche.ddp.group import TorchGroup
from elche.errors import ConfigError, MismatchError

SHOWN_DIFFERENCES = 5
PROBLEM = "problem"
DEVICE = "device"
PROCESS = "process"
NUMBER = "number"
OWN = (DEVICE, PROCESS, NUMBER)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank as it presented itself.

    Attributes:
        device: the kind of device that its parameters are on.
        pid: its process, by the numbers of its own host.
        number: of wrappers that it had made before this one.
    """

    device: str
    pid: int
    number: int


def describe(
    model: nn.Module, ignored: frozenset[str], options: Mapping[str, Any]
) -> dict[str, str]:
    """Everything that must be the same on every rank, but values.

    What cannot be reduced is described as a problem, so that all ranks learn of it
    instead of waiting for the one that has it.

    Args:
        model: the model.
        ignored: names of parameters and buffers that stay local.
        options: the wrapper's settings.
    """
    found = {f"option {name}": repr(value) for name, value in options.items()}
    found[DEVICE], found[PROCESS] = "none", str(os.getpid())
    found[NUMBER] = str(next(_numbers))
    problem = _problem(model, ignored, with_buffers=options["broadcast_buffers"])
    if problem:
        return {**found, PROBLEM: problem}
    devices = set()
    for at, (name, parameter) in enumerate(kept(model.named_parameters(), ignored)):
        trained = "trained" if parameter.requires_grad else "frozen"
        found[f"parameter {name}"] = f"{_layout(parameter)} {trained}"
        found[f"place {at}"] = name
        devices.add(parameter.device.type)
    for name, buffer in kept(model.named_buffers(), ignored):
        found[f"buffer {name}"] = _layout(buffer)
    found[DEVICE] = " and ".join(sorted(devices))
    return found


def agree(group: Group, mine: Mapping[str, str]) -> list[Peer]:
    """Compares what all ranks presented; returns who they are.

    Raises:
        ConfigError: a rank has something that cannot be reduced.
        MismatchError: ranks differ; the message names the difference.
    """
    ranks = [
        json.loads(text)
        for text in gather_texts(group, json.dumps(dict(mine)), "comparing the ranks")
    ]
    for rank, found in enumerate(ranks):
        if PROBLEM in found:
            raise ConfigError(f"on rank {rank}: {found[PROBLEM]}")
    for rank, found in enumerate(ranks):
        names = sorted(
            name
            for name in {*ranks[0], *found}
            if name not in OWN and ranks[0].get(name) != found.get(name)
        )
        named = [name for name in names if not name.startswith("place ")] or names
        if named:
            lines = [
                f"{name}: rank 0 has {ranks[0].get(name, 'none')}, "
                f"rank {rank} has {found.get(name, 'none')}"
                for name in named[:SHOWN_DIFFERENCES]
            ]
            more = len(named) - SHOWN_DIFFERENCES
            raise MismatchError(
                "ranks differ in what they would reduce: "
                + "; ".join([*lines, f"and {more} more"] if more > 0 else lines)
                + "; build the same model with the same arguments on every rank"
            )
    return [
        Peer(found[DEVICE], int(found[PROCESS]), int(found[NUMBER])) for found in ranks
    ]


def share_host(group: TorchGroup, peers: Sequence[Peer]) -> None:
    """Lets ranks that all compute on the CPU try memory that they share.

    A wait in it sees no connection end, so it looks after their processes.
    """
    on_cpu = bool(peers) and all(peer.device == "cpu" for peer in peers)
    group.shares_host = agree_to_share(group, on_cpu and can_share("CPU"))
    group.watch([peer.pid for peer in peers])


@torch.no_grad()
def spread(group: Group, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Copies one rank's values to all, bit for bit."""
    for tensor in tensors:
        raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        if group.rank != source:
            raw = torch.zeros_like(raw)
        elif raw.data_ptr() == tensor.data_ptr():
            raw = raw.clone()
        if raw.numel():
            group.all_reduce(raw, "spreading the model")
        if group.rank != source:
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def kept(named: Any, ignored: frozenset[str]) -> list[tuple[str, Any]]:
    """Named tensors that are not ignored."""
    return [(name, tensor) for name, tensor in named if name not in ignored]


def tensors_of(
    model: nn.Module, ignored: frozenset[str], *, with_buffers: bool
) -> list[torch.Tensor]:
    """Parameters that are not ignored, and buffers where asked."""
    named = kept(model.named_parameters(), ignored)
    if with_buffers:
        named += kept(model.named_buffers(), ignored)
    return [tensor for _, tensor in named]


def agreed_order(
    group: Group, observed: Sequence[int] | None, count: int
) -> list[int] | None:
    """The order of gradients that the group's rank 0 has observed, if any.

    Args:
        group: all ranks, which call this together.
        observed: by this rank, as indices of its parameters; None for not yet.
        count: parameters.
    """
    message = torch.zeros(count, dtype=torch.int64, device="cpu")
    if group.rank == 0 and observed and len(observed) == count:
        message = torch.tensor(observed, device="cpu") + 1
    group.all_reduce(message, "agreeing on the order of gradients")
    order = [at - 1 for at in message.tolist()]
    return order if sorted(order) == list(range(count)) else None


def _layout(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    contiguous = tensor.is_contiguous()
    strides = "" if contiguous else f" strides {list(tensor.stride())}"
    return f"{list(tensor.shape)} {dtype}{strides}"


def _problem(model: nn.Module, ignored: frozenset[str], *, with_buffers: bool) -> str:
    """Why the model cannot be reduced, or ""."""
    parameters = kept(model.named_parameters(), ignored)
    if not any(parameter.requires_grad for _, parameter in parameters):
        return (
            "DistributedDataParallel is not needed when a module doesn't have any "
            "parameter that requires a gradient"
        )
    if fault := unshareable_module(model):
        return fault
    buffers = kept(model.named_buffers(), ignored) if with_buffers else []
    tensors = [*parameters, *buffers]
    found = (f"{name} {why}" for name, t in tensors if (why := why_unshareable(t)))
    return next(found, "")
