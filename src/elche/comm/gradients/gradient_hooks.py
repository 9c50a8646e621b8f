"""Hooks of a backward pass, and changes to what a model trains.

Hooks on gradients run after the user's own.

A replayed CUDA graph runs no hook: a backward pass inside one brings no gradient to a
reduction, and is refused where it is captured. `torch.cuda.make_graphed_callables`
captures modules apart from the backward pass around them, and is fine.

Reentrant activation checkpointing runs a backward pass of its own inside a node of the
one that the loop began, and autograd calls back at the end of each. Gradients are
complete when the outermost has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from elche.errors import ConfigError
from elche.torch_internals.held import (
    accumulated_hooks,
    held_modules,
    held_parameters,
)
from elche.torch_internals.passes import current_node, queue_callback

_IS_TRAINED = attrgetter("requires_grad")
_VALUES = methodcaller("values")


class GradientHooks:
    """One hook per parameter, called when its gradient has been accumulated.

    The hooks go with this object: parameters outlive a wrapper that is dropped.

    Args:
        parameters: trainable, each once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self._nodes: dict[int, Any] = {}
        self._watches: list[Any] = []
        self._brought: dict[int, bool] = {}

    def attach(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Hooks every parameter."""
        self._handles += [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter in self._parameters
        ]
        weakref.finalize(self, _remove, self._handles).atexit = False
        weakref.finalize(self, _remove, self._watches).atexit = False
        self.keep_last()

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        _remove(self._handles)
        _remove(self._watches)
        self._nodes.clear()

    def keep_last(self, current: int | None = None) -> bool:
        """Lets hooks of the user's own run first: what they make of it is reduced.

        Called before a forward pass, so that :meth:`was_taken` can tell.

        Args:
            current: parameter whose hooks are run just now; None: none.

        Returns:
            False if hooks of the user's own follow the one here on that parameter.
        """
        hooked = filter(None, map(accumulated_hooks, self._parameters))
        if set(map(len, hooked)) <= {1}:
            return True  # as in most models: there is none but the one here
        ran_last = [*map(self._move_last, range(len(self._parameters)))]
        for index, parameter in enumerate(self._parameters):
            if len(accumulated_hooks(parameter) or ()) > 1 and parameter.requires_grad:
                self._watch(index, parameter)
        return current is None or ran_last[current]

    def was_taken(self, index: int) -> bool:
        """True if a hook took the gradient that autograd had for a parameter.

        Asked in the hook here, where ``p.grad`` is None: autograd comes by without a
        gradient, too (a function's backward returned None).
        """
        hooks: Any = accumulated_hooks(self._parameters[index])
        if not hooks or next(iter(hooks)) == self._handles[index].id:
            return False  # no hook came before
        return self._brought.get(index, True)

    def _watch(self, index: int, parameter: nn.Parameter) -> None:
        """Looks at what autograd brings, before any hook on the accumulated gradient.

        It takes longer than those hooks, so only where there are others to suspect.
        """
        node: Any = get_gradient_edge(parameter).node
        if self._nodes.get(index) is node:
            return
        brought = self._brought

        def look(gradients: tuple[torch.Tensor | None, ...]) -> None:
            brought[index] = gradients[0] is not None

        self._nodes[index] = node  # torch itself keeps it only while a graph does
        self._watches.append(node.register_prehook(look))

    def _move_last(self, index: int) -> bool:
        """True if no hook of the user's own follows; the next time none will."""
        parameter, handle = self._parameters[index], self._handles[index]
        hooks: Any = accumulated_hooks(parameter)
        if not hooks or next(reversed(hooks)) == handle.id or handle.id not in hooks:
            return True
        hooks[handle.id] = hooks.pop(handle.id)  # torch runs them as inserted
        return False


@final
class ParameterWatch:
    """Parameters of a model's modules, trained ones marked, when this was made.

    Walking ``model.parameters()`` costs 0.1 ms where there are forty modules. Comparing
    what all of them hold, one after another, with what they held then costs a tenth of
    that, as no line of Python runs for each.

    Args:
        model: the model.

    Attributes:
        parameters: of the model, each once, as it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self._were_trained = list(map(_IS_TRAINED, self.parameters))
        holders = [
            held
            for module in model.modules()
            for held in (held_parameters(module), held_modules(module))
        ]
        self._empty = [held for held in holders if not held]
        self._filled = [held for held in holders if held]
        self._counts = list(map(len, self._filled))
        self._held = list(chain.from_iterable(map(_VALUES, self._filled)))

    @property
    def is_same(self) -> bool:
        """True if nothing has changed; False may also mean that it cannot be told."""
        return (
            list(map(_IS_TRAINED, self.parameters)) == self._were_trained
            and not any(self._empty)
            and list(map(len, self._filled)) == self._counts
            and all(
                map(is_, chain.from_iterable(map(_VALUES, self._filled)), self._held)
            )
        )


def refuse_capture() -> None:
    """Refuses to reduce gradients inside the capture of a CUDA graph.

    Raises:
        ConfigError: the current stream is being captured.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "gradients are reduced by hooks in the backward pass, which a CUDA graph "
            "does not replay: a graph must not hold a whole training step here; "
            "capture the model with torch.cuda.make_graphed_callables, or average "
            "parameters (policy 'async', or 'cadence'), which needs no hook"
        )


def refuse_gradient(
    gradient: torch.Tensor | None, name: str, dtype: torch.dtype
) -> None:
    """Refuses a gradient that cannot be reduced.

    Raises:
        ConfigError: it has none, or one of another kind than a message has.
    """
    if gradient is None:
        raise ConfigError(
            f"{name}: a hook took its gradient away before it was "
            "reduced; step after the backward pass"
        )
    if gradient.is_sparse or gradient.layout is not torch.strided:
        raise ConfigError(
            f"{name}: its gradient is sparse, which cannot be reduced; use sparse=False"
        )
    if gradient.requires_grad:
        raise ConfigError(
            f"{name}: its gradient came from a backward with "
            "create_graph=True, which a reduction cannot be differentiated "
            "through; differentiate with torch.autograd.grad(..., create_graph=True), "
            "make a loss of what it returns, and call backward() on that alone"
        )
    if gradient.dtype is not dtype:
        raise ConfigError(
            f"{name}: expected a gradient of {dtype}, as its "
            f"parameter was when buckets were made, got {gradient.dtype}; convert "
            "a model between epochs, on every rank"
        )


def at_backward_end(call: Callable[[], None]) -> None:
    """Calls back once, when the backward pass under way and all around it have ended.

    For hooks of gradients. A pass that an error breaks off calls no hook.
    """
    queue_callback(partial(_at_end, call))


def _at_end(call: Callable[[], None]) -> None:
    """A pass has ended; in a node of the one around it, if there is one."""
    around = current_node()
    if around is None:
        call()
        return
    # Only hooks that run in the outer pass can ask to be called at its end: of the
    # nodes that it comes to next, one at least.
    handles: list[RemovableHandle] = []

    def go_on(gradients: Any) -> None:
        while handles:
            handles.pop().remove()
            if not handles:
                at_backward_end(call)

    for node, _ in around.next_functions:
        if node is not None:
            handles.append(node.register_prehook(go_on))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
