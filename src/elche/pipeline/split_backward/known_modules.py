"""Modules of torch whose forward goes straight to the deferred operations.

Any module is split without this: its weights are found out by their type
(`elche.pipeline.split_backward.deferred`), which costs each operation some
microseconds, and attention more. Linear layers and `nn.MultiheadAttention` are spared
that.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.split_backward.deferred import linear, multi_head_attention
from elche.pipeline.split_backward.seen_through import seen_through
from elche.torch_internals.held import held_parameters


@final
class KnownModules:
    """Gives linear layers and attention of some modules their short way, and back.

    A module with a forward of its own, by a subclass or set on it, keeps that.

    Args:
        modules: those, and all inside them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._forwards: list[tuple[dict[str, Any], Callable[..., Any]]] = []

    def begin_step(self) -> None:
        """Looks which modules there are: they may have been changed since."""
        self._forwards = []
        found = {id(one): one for top in self._modules for one in top.modules()}
        for module in found.values():
            make = _SHORT.get(getattr(type(module), "forward", None))
            if make is not None and "forward" not in vars(module):
                self._forwards.append((vars(module), make(module)))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The modules take the short way meanwhile."""
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, forward in self._forwards:
                if attributes.get("forward") is forward:
                    del attributes["forward"]


def _linear_forward(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
    parameters = held_parameters(self)
    weight = parameters.get("weight")
    if weight is None or "bias" not in parameters:  # parametrized since
        return nn.Linear.forward(self, input)  # type: ignore[arg-type]
    return linear(input, weight, parameters["bias"])


_linear_forward.__name__ = "forward"  # what a pickled copy of the module looks for


def _linear(module: nn.Module) -> Callable[..., Any]:
    # Bound, so that a copy that the stage makes of a module computes with its own.
    return types.MethodType(_linear_forward, module)


_attention = seen_through(
    nn.MultiheadAttention.forward,
    F=types.SimpleNamespace(
        **{**vars(F), "multi_head_attention_forward": multi_head_attention}
    ),
)


def _multi_head_attention(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(_attention, module)


_SHORT: dict[Any, Callable[[nn.Module], Callable[..., Any]]] = {
    nn.Linear.forward: _linear,
    nn.MultiheadAttention.forward: _multi_head_attention,
}
