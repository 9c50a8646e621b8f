"""Samples of a forward pass, and checks of the model before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.tensors.nested import items_of, tensors_in
from elche.errors import ConfigError
from elche.torch_internals.held import held_parameters

Place = tuple[dict[str, Any], str, str, nn.Parameter, torch.dtype]
"""Holder and key of a parameter, its name in the model, itself, its dtype."""


def places_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Place]:
    """Places at which a model holds parameters."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        (held, key, f"{path}.{key}" if path else key, parameter, parameter.dtype)
        for path, module in model.named_modules()
        for held in [held_parameters(module)]
        for key, parameter in held.items()
        if parameter is not None and id(parameter) in wanted
    ]


def refuse_replaced(places: list[Place], model: nn.Module) -> None:
    """Refuses a model whose parameters are not those that are reduced, as they were.

    One that the model holds elsewhere now (pruning and parametrizations move it) is
    still reduced: ``places`` is brought up to date.

    Raises:
        ConfigError: names one.
    """
    has_moved = False
    for held, key, name, parameter, dtype in places:
        if parameter.dtype is not dtype:
            raise ConfigError(
                f"{name} was {dtype} when the model was wrapped and is "
                f"{parameter.dtype} now; convert it before wrapping the model"
            )
        if key in held and held[key] is parameter:
            continue
        has_moved = True
        if all(parameter is not each for each in model.parameters()):
            raise ConfigError(
                f"{name} was replaced after the model was wrapped, so its gradient "
                "would not be reduced; assign to its .data, or wrap the model again"
            )
    if has_moved:
        places[:] = places_of(model, [parameter for *_, parameter, _ in places])


def samples_in(inputs: Any, dim: int) -> float:
    """Samples of a batch: the size of its first tensor along ``dim``; 1 without one.

    Of packed sequences their number.
    """
    if isinstance(inputs, nn.utils.rnn.PackedSequence):
        return float(inputs.batch_sizes[0]) if len(inputs.batch_sizes) else 0.0
    if isinstance(inputs, torch.Tensor):
        return float(inputs.shape[dim]) if inputs.dim() > dim else 1.0
    for item in items_of(inputs) or ():
        if any(tensor.dim() > dim for tensor in tensors_in(item)):
            return samples_in(item, dim)
    return 1.0
