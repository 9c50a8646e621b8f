"""A factor applied to the gradients of a backward pass before accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import nn

Gradients = tuple[torch.Tensor | None, ...]


def scaled(gradients: Gradients, factor: float) -> Gradients:
    """Multiplies gradients by a factor; factor 0 yields zeros even for NaN."""
    if factor == 1.0:
        return gradients
    if factor == 0.0:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)
    return tuple(None if g is None else g * factor for g in gradients)


def accumulation_nodes(parameters: Iterable[nn.Parameter]) -> list[Any]:
    """Returns the AccumulateGrad nodes; torch frees them unless a graph holds them."""
    nodes: list[Any] = []
    for parameter in parameters:
        with torch.enable_grad():
            made = parameter.view_as(parameter).grad_fn
        assert made is not None
        nodes.append(made.next_functions[0][0])
    return nodes


def hook_accumulation(
    nodes: Iterable[Any], change: Callable[[Gradients], Gradients]
) -> list[Any]:
    """Hooks a method that changes gradients before accumulation; returns handles.

    Args:
        nodes: nodes from :func:`accumulation_nodes`.
        change: bound method that maps gradients; held weakly by the hooks.
    """
    me = weakref.WeakMethod(change)

    def changed(gradients: Gradients) -> Gradients:
        method = me()
        return gradients if method is None else method(gradients)

    return [node.register_prehook(changed) for node in nodes]


@final
class GradientFactor:
    """A factor applied to gradients when they are accumulated.

    `torch.autograd.grad` and gradients already in ``p.grad`` are unaffected.

    Attributes:
        value: the factor; 0 adds zeros even if gradients are NaN or Inf.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self.value = 1.0

    def attach(self) -> None:
        """Hooks every parameter."""
        self._nodes = accumulation_nodes(self._parameters)
        self._handles = hook_accumulation(self._nodes, self._multiplied)

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _multiplied(self, gradients: Gradients) -> Gradients:
        return scaled(gradients, self.value)
