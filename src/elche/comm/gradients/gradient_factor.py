"""A factor on the gradients of a backward pass, before their accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

_Gradients = tuple[torch.Tensor | None, ...]


@final
class GradientFactor:
    """A factor on the gradients of some parameters, where they are accumulated.

    So `torch.autograd.grad` answers as ever, and what ``p.grad`` holds already stays.

    Args:
        parameters: the trainable ones.

    Attributes:
        value: the factor; with 0 zeros are added, also where gradients are NaN or Inf.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self.value = 1.0

    def attach(self) -> None:
        """Hooks every parameter."""
        me = weakref.WeakMethod(self._multiplied)

        def multiply(gradients: _Gradients) -> _Gradients:
            multiplied = me()
            return gradients if multiplied is None else multiplied(gradients)

        for parameter in self._parameters:
            with torch.enable_grad():
                made = parameter.view_as(parameter).grad_fn
            assert made is not None
            node: Any = made.next_functions[0][0]
            self._nodes.append(node)  # torch itself keeps it only while a graph does
            self._handles.append(node.register_prehook(multiply))

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _multiplied(self, gradients: _Gradients) -> _Gradients:
        if self.value == 1.0:
            return gradients
        if self.value == 0.0:
            return tuple(None if g is None else torch.zeros_like(g) for g in gradients)
        return tuple(None if g is None else g * self.value for g in gradients)
