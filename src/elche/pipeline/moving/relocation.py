"""Layers that move between ranks: values, modes and optimizer state, as tensors.

The new owner builds the layer (from its factory, from the meta device, or from its own
copy of the module) and receives all that training has made of it. Nothing is pickled,
and nothing changes on any rank before every rank has what it gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from elche.errors import MismatchError
from elche.pipeline.moving.moving_optimizers import (
    Moving,
    OptimizerGroups,
    pack_state,
    unpack_state,
)
from elche.pipeline.peers.stage_messages import Message, head_of
from elche.pipeline.stage import Layer
from elche.torch_internals.held import held_buffers

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Move:
    """One layer's way.

    Attributes:
        layer: its index in the model.
        source: the rank that has it.
        target: the rank that gets it.
    """

    layer: int
    source: int
    target: int


def owners(placement: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The rank of each layer, from ranks and sizes of the stages."""
    return [
        rank for rank, size in zip(placement, sizes, strict=True) for _ in range(size)
    ]


def moves_between(before: Sequence[int], after: Sequence[int]) -> list[Move]:
    """Layers whose rank changes, in the model's order."""
    return [
        Move(index, source, target)
        for index, (source, target) in enumerate(zip(before, after, strict=True))
        if source != target
    ]


@final
class Baggage:
    """What a layer takes along.

    Args:
        layer: it.
        groups: the optimizers that hold its parameters.

    Raises:
        ConfigError: an optimizer's state cannot travel.
        ProtocolError: a tensor cannot.
    """

    def __init__(self, layer: Layer, groups: OptimizerGroups) -> None:
        records: list[Any] = []
        tensors: list[torch.Tensor] = []
        for name, one in layer.module.named_parameters():
            packed, state = pack_state(groups.leaving(layer.prefixed(name), one))
            grads = [] if one.grad is None else [one.grad]
            records.append([name, one.requires_grad, len(grads), len(state), packed])
            tensors += [one.detach(), *grads, *state]
        buffers = dict(layer.module.named_buffers())
        tensors += buffers.values()
        modes = [one.training for one in layer.module.modules()]
        self.message = Message(tuple(tensors), [records, list(buffers), modes])
        self.size_bytes = sum(one.nbytes for one in tensors)
        head_of(self.message)


def unload(message: Message, layer: Layer, keep: set[int]) -> list[tuple[str, Moving]]:
    """Gives a layer what has come for it.

    Args:
        message: of `Baggage`.
        layer: built here, of the same form.
        keep: ids of parameters that live here already, shared with another layer.

    Returns:
        Own name and record of each of its parameters.
    """
    records, buffers, modes = message.structure
    tensors = iter(message.tensors)
    come = []
    for name, learns, grads, states, packed in records:
        parameter = layer.module.get_parameter(name)
        value = next(tensors)
        found = [next(tensors) for _ in range(grads)]
        if id(parameter) not in keep:
            parameter.data = value.to(parameter.device)
            parameter.requires_grad_(learns)
            parameter.grad = found[0].to(parameter.device) if found else None
        state = [next(tensors) for _ in range(states)]
        come.append((name, unpack_state(packed, state)))
    for name in buffers:
        owner, _, own = name.rpartition(".")
        module = layer.module.get_submodule(owner)
        buffers = held_buffers(module)
        buffers[own] = next(tensors).to(buffers[own].device)
    for one, mode in zip(layer.module.modules(), modes, strict=True):
        one.training = mode
    return come


def form_of(layer: Layer) -> list[Any]:
    """What the rank that has a layer and the one that gets it must agree on."""
    held = (*layer.module.named_parameters(), *layer.module.named_buffers())
    return [
        [[name, list(one.shape)] for name, one in held],
        sum(1 for _ in layer.module.modules()),
    ]


def check_forms(moves: Iterable[Move], told: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises unless each layer has one form on both ranks.

    Args:
        moves: of all layers.
        told: by rank, forms of the layers that it gives or gets, by index as text.

    Raises:
        MismatchError: a layer was built otherwise.
    """
    for each in moves:
        given, got = (told[r][str(each.layer)] for r in (each.source, each.target))
        if given != got:
            wrong = [one for one in got[0] if one not in given[0]]
            shown = ", ".join(f"{name} {shape}" for name, shape in wrong[:_SHOWN])
            raise MismatchError(
                f"rank {each.target} builds layer {each.layer} otherwise than rank "
                f"{each.source} has it ({shown or 'fewer or other modules'}); its "
                "factory must make the same everywhere, and modules must not be "
                "changed by hand"
            )


def release(layer: Layer, device: torch.device, was_meta: bool, live: set[int]) -> None:
    """Frees the device from a module that has moved away.

    Args:
        layer: that was built here.
        device: it was on.
        was_meta: whether it was given on the meta device.
        live: ids of parameters that other layers here share with it.
    """
    held: list[nn.Parameter] = list(layer.module.parameters())
    for one in held:
        if id(one) not in live:
            one.grad = None
    if any(id(one) in live for one in held):
        return
    if was_meta:
        layer.module.to("meta")
    elif device.type != "cpu":
        layer.module.to("cpu")
