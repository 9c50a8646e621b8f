"""Gradients that a rank has accumulated and not reduced yet.

A loop may drop them (a cycle that is skipped, a backward that only measured), and tells
nobody: ``p.grad`` is None then, or was set to zeros.
"""

from __future__ import annotations

from typing import Any, final

import torch

from elche.torch_internals.held import version
from elche.torch_internals.passes import graph_task_id

_NO_PASS = -1


@final
class Accumulated:
    """What backward passes have left in ``p.grad`` for a reduction to come."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[torch.Tensor, tuple[int, Any]]] = {}
        self._asked_in = _NO_PASS

    def add(self, parameter: torch.Tensor) -> None:
        """A gradient was added to ``p.grad``."""
        if parameter.grad is not None:
            self._left.pop(id(parameter), None)
            self._left[id(parameter)] = parameter, _state(parameter.grad)

    def clear(self) -> None:
        """It has been reduced."""
        self._left.clear()

    def was_dropped(self, but: torch.Tensor | None = None) -> bool:
        """Whether the loop has dropped all of it; True once.

        Asked outside of backward passes, and at the beginning of each: what it adds
        tells nothing any more.

        Args:
            but: a parameter that the pass has added to already.
        """
        number = graph_task_id()
        if number == self._asked_in != _NO_PASS:
            return False
        self._asked_in = number
        is_gone = self._is_gone(but)
        if is_gone:
            self._left.clear()
        return is_gone

    def _is_gone(self, but: torch.Tensor | None) -> bool:
        """Whether all of it is None or zeros, and has been written to since.

        A gradient may well be zero, so zeros that nobody wrote are there. Values are
        read, which waits for a device, only where all gradients have been written to.
        """
        left = [(p, state) for p, state in self._left.values() if p is not but]
        for parameter, state in reversed(left):  # the last one: views share a version
            if parameter.grad is not None and _state(parameter.grad) == state:
                return False
        gradients = (p.grad for p, _ in left if p.grad is not None)
        return bool(left) and not any(bool(g.count_nonzero()) for g in gradients)


def _state(gradient: torch.Tensor) -> tuple[int, Any]:
    """Another one when the gradient has been replaced or written to."""
    return id(gradient), version(gradient)
