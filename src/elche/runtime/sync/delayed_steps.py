"""Steps of `policy="delayed_sync"`: they apply gradients one step late.

While the gradients of one step are summed, the next one is computed. To fit the
parameters that they move, gradients are computed where these will be if the last move
is repeated: at θ + (θ − θ_before). For step k, on every rank:

    g_k = mean gradient at θ_k + (θ_k − θ_{k−1}), reduced during step k+1
    θ_{k+1} = the optimizer's step from θ_k by g_{k−1}

A drain (an epoch's end, a checkpoint, a stop) waits for the last sum and takes its
step, so that every gradient moves the model once. The first step after a drain has no
sum to apply, and is computed at θ itself. The sums of a process's first step, which
records the order of gradients, are awaited at once, but applied one step late too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import nn

from elche.comm.gradients.reducer import GradientReducer


@final
class DelayedSteps:
    """Keeps the last step's parameters while the loop computes with predicted ones.

    Args:
        update: clips ``p.grad``, steps the optimizer with it, and drops it.
    """

    def __init__(self, update: Callable[[], None]) -> None:
        self._update = update
        self._reducer: GradientReducer | None = None
        self._parameters: Sequence[nn.Parameter] = ()
        self._own: list[torch.Tensor] = []

    @property
    def extra_bytes(self) -> int:
        """Memory of the parameters that are kept."""
        return sum(p.numel() * p.element_size() for p in self._parameters)

    def attach(
        self, reducer: GradientReducer, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Resets after the reducer was rebuilt; no reduction is in progress."""
        self._reducer, self._parameters, self._own = reducer, parameters, []
        reducer.delay()

    @torch.no_grad()
    def step(self) -> None:
        """Applies the sum that arrived in a backward pass, and extrapolates again."""
        assert self._reducer is not None
        if self._own:
            self._return()
        else:
            self._own = [parameter.detach().clone() for parameter in self._parameters]
        if self._reducer.has_sums:
            self._update()
        for parameter, before in zip(self._parameters, self._own, strict=True):
            move = parameter - before
            before.copy_(parameter)
            parameter.add_(move)

    def drain(self) -> None:
        """Takes the step whose gradients are still being reduced, with all ranks.

        Raises:
            CommunicationError: ranks did not arrive in time.
        """
        if self._own:
            self._return()
            self._own = []
        if self._reducer is not None and self._reducer.drain():
            self._update()

    @torch.no_grad()
    def _return(self) -> None:
        """Restores the model's own parameters."""
        for parameter, own in zip(self._parameters, self._own, strict=True):
            parameter.copy_(own)
