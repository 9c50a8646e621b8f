"""Optimizers of a rank's local steps between two reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import nn

from elche.comm.averaging.optimizer_state import forget_state


@final
class LocalSteps:
    """State that this rank's own steps leave beside its parameters.

    Args:
        model: what is trained.
        optimizers: returns those that step it, the one given to `elche.setup` first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Callable[[], list[torch.optim.Optimizer]],
    ) -> None:
        self._model = model
        self.optimizers = optimizers

    def forget_states(self) -> None:
        """Takes optimizers back to where they had taken no step."""
        for optimizer in self.optimizers():
            forget_state(optimizer)

    def drop_gradients(self) -> None:
        """Forgets what waits for a step."""
        for parameter in self._model.parameters():
            parameter.grad = None
