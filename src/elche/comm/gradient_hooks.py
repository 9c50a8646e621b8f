"""Hooks on every parameter's gradient that run after the user's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from elche.torch_internals import accumulated_hooks


class GradientHooks:
    """One hook per parameter, called when its gradient has been accumulated.

    The hooks go with this object: parameters outlive a wrapper that is dropped.

    Args:
        parameters: trainable, each once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []

    def attach(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Hooks every parameter."""
        self._handles += [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter in self._parameters
        ]
        weakref.finalize(self, _remove, self._handles).atexit = False

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        _remove(self._handles)

    def keep_last(self) -> None:
        """Lets hooks of the user's own run first: what they make of it is reduced."""
        hooked = filter(None, map(accumulated_hooks, self._parameters))
        if set(map(len, hooked)) <= {1}:
            return  # as in most models: there is none but the one here
        for index in range(len(self._handles)):
            self.runs_last(index)

    def runs_last(self, index: int) -> bool:
        """Whether no hook of the user's own follows; the next time none will."""
        parameter, handle = self._parameters[index], self._handles[index]
        hooks: Any = accumulated_hooks(parameter)
        if not hooks or next(reversed(hooks)) == handle.id or handle.id not in hooks:
            return True
        hooks[handle.id] = hooks.pop(handle.id)  # torch runs them as inserted
        return False


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
