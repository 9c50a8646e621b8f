"""Optimizers of a rank's local steps between two reductions."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from elche.comm.averaging.optimizer_state import forget_state
from elche.runtime.watch.optimizers_seen import OptimizersSeen


@final
class LocalSteps:
    """What this rank's own steps leave behind beside its parameters.

    Args:
        model: what is trained.
        optimizers: those that step it.
    """

    def __init__(self, model: nn.Module, optimizers: OptimizersSeen) -> None:
        self._model = model
        self._optimizers = optimizers

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that step the model, the one given to `elche.setup` first."""
        return self._optimizers.all()

    def forget_states(self) -> None:
        """Takes optimizers back to where they had taken no step."""
        for optimizer in self._optimizers.all():
            forget_state(optimizer)

    def drop_gradients(self) -> None:
        """Forgets what waits for a step."""
        for parameter in self._model.parameters():
            parameter.grad = None
