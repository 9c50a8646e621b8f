"""Steps of `policy="delayed_sync"`: by the gradients of the step before, taken ahead.

While the gradients of one step are summed, the next one is computed. So that they fit
the parameters that they move, they are taken where these will be if the last move is
made again: at θ + (θ − θ_before). For step k, on every rank alike:

    g_k = mean gradient at θ_k + (θ_k − θ_{k−1}), its sum under way during step k+1
    θ_{k+1} = the optimizer's step from θ_k by g_{k−1}

A drain (an epoch's end, a checkpoint, a stop) waits for the last sum and takes its
step, so that every gradient moves the model once. The first step after one has no sum
to move by, and is taken at θ itself. The sums of a process's first step, in which the
order of gradients is found out, are waited for at once and move the model as late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import nn

from elche.comm.gradients.reducer import GradientReducer


@final
class DelayedSteps:
    """Keeps the model's own parameters while the loop's are ahead of them.

    Args:
        update: clips and steps by ``p.grad``, and drops it.
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
        """After a backward pass: moves by the sum that came in it, and goes ahead."""
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
        """Takes the step whose gradients are still under way, with all ranks.

        Raises:
            CommunicationError: they did not come.
        """
        if self._own:
            self._return()
            self._own = []
        if self._reducer is not None and self._reducer.drain():
            self._update()

    @torch.no_grad()
    def _return(self) -> None:
        """The parameters are the model's own again."""
        for parameter, own in zip(self._parameters, self._own, strict=True):
            parameter.copy_(own)
