"""Analysis of a forward pass for the reduction of its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.tensors.nested import items_of, tensors_in
from elche.errors import ConfigError
from elche.torch_internals.held import held_parameters
from elche.torch_internals.passes import queue_callback

Place = tuple[dict[str, Any], str, str, nn.Parameter, torch.dtype]
"""What holds a parameter, under what key; its name in the model, itself, its dtype."""


def places_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Place]:
    """Where a model holds parameters."""
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
                f"{parameter.dtype} now; call set_group() on every rank after "
                "converting it"
            )
        if key in held and held[key] is parameter:
            continue
        has_moved = True
        if all(parameter is not each for each in model.parameters()):
            raise ConfigError(
                f"{name} was replaced after the model was wrapped, so its gradient "
                "would not be reduced; assign to its .data, or call set_group() on "
                "every rank after replacing it"
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


def on_backward(outputs: Iterable[torch.Tensor], call: Callable[[], None]) -> bool:
    """Calls back once when a backward pass goes through any of the outputs.

    Again in the next backward pass, if the graph was retained.

    Returns:
        Whether any output can have a backward pass.
    """
    watched = [tensor for tensor in outputs if tensor.requires_grad]
    called = _Once(call)
    for tensor in watched:
        tensor.register_hook(called)
    return bool(watched)


class _Once:
    """Calls back at the first of several hooks of one backward pass."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._is_called = False

    def __call__(self, gradient: torch.Tensor) -> None:
        if self._is_called:
            return
        self._is_called = True
        queue_callback(self._reset)
        self._call()

    def _reset(self) -> None:
        self._is_called = False


def unused_of(
    outputs: Iterable[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> frozenset[int]:
    """Indices of parameters that no output depends on, by the autograd graph."""
    left = {id(parameter): at for at, parameter in enumerate(parameters)}
    stack: list[Any] = []
    for output in outputs:
        left.pop(id(output), None)
        stack.append(output.grad_fn)
    seen: set[Any] = set()
    while stack and left:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            left.pop(id(variable), None)
        stack.extend(following for following, _ in node.next_functions)
    return frozenset(left.values())
