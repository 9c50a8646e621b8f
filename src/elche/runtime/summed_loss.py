"""Gradients of a loss that is a sum over samples, under ``sync``.

The gradient of the sum over the union batch is the sum of the ranks' gradients. But in
a second backward pass before the optimizer's step ``p.grad`` already holds the sum of
the first, on every rank, and must not be added up again. So the reduction is a plain
mean over the ranks that have samples, and what a pass adds is multiplied by their
number before it gets to ``p.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from elche.comm.reducer import GradientReducer

_Gradients = tuple[torch.Tensor | None, ...]


@final
class SummedReducer:
    """Makes a reducer of means one of sums.

    Args:
        reducer: takes the mean over ranks that this sets; not attached yet.
        parameters: the ones it reduces.
    """

    def __init__(
        self, reducer: GradientReducer, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._reducer = reducer
        self._parameters = list(parameters)
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self._factor = 1.0

    @property
    def extra_bytes(self) -> int:
        """Memory held beside the gradients."""
        return self._reducer.extra_bytes

    @property
    def wait_s(self) -> float:
        """Seconds of this step in which nothing but other ranks was waited for."""
        return self._reducer.wait_s

    @property
    def backward_passes(self) -> int:
        """Backward passes reduced so far."""
        return self._reducer.backward_passes

    def attach(self) -> None:
        """Allocates buckets and hooks every parameter.

        The hooks are where gradients are accumulated, so that `torch.autograd.grad`
        answers as ever.

        Raises:
            ConfigError: there is no parameter.
        """
        self._reducer.attach()
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
        self._reducer.detach()

    def begin_step(self, scale: float, active_ranks: int) -> None:
        """See :meth:`GradientReducer.begin_step`; only whether ``scale`` is 0 counts.

        Raises:
            CommunicationError: the backward pass before was broken off.
        """
        self._factor = float(max(1, active_ranks))
        self._reducer.begin_step(float(scale > 0) / self._factor, active_ranks)

    def end_step(self) -> None:
        """Backward passes after this are the user's own.

        Raises:
            CommunicationError: the step's backward pass was broken off.
        """
        self._factor = 1.0
        self._reducer.end_step()

    def run_beneath(self, work: Callable[[], None] | None) -> None:
        """See :meth:`GradientReducer.run_beneath`."""
        self._reducer.run_beneath(work)

    def hold(self, holds: bool) -> None:
        """See :meth:`GradientReducer.hold`."""
        self._reducer.hold(holds)

    def rewind(self) -> None:
        """See :meth:`GradientReducer.rewind`."""
        self._reducer.rewind()

    def _multiplied(self, gradients: _Gradients) -> _Gradients:
        """What a pass adds to ``p.grad``, as often as ranks take the mean."""
        if self._factor == 1.0:
            return gradients
        return tuple(None if g is None else g * self._factor for g in gradients)
