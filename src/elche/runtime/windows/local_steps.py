"""Optimizers of a rank's local steps between two reductions."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from elche.comm.averaging.optimizer_state import forget_state
from elche.comm.tensors.nan_check import all_finite
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

    def states_in_words(self) -> str:
        """Which optimizers have stepped the model, and for what they hold state."""
        words = []
        for optimizer in self._optimizers.all():
            held = [p for group in optimizer.param_groups for p in group["params"]]
            count = sum(bool(optimizer.state.get(p)) for p in held)
            name = type(optimizer).__name__
            words.append(f"{name} holds state for {count} of {len(held)} parameters")
        return ", ".join(words)

    def forget_states(self, *, only_lost: bool = False) -> None:
        """Takes optimizers back to where they had taken no step.

        Args:
            only_lost: those whose state is not all numbers; False: all of them.
        """
        for optimizer in self._optimizers.all():
            if not only_lost or not _is_finite(optimizer):
                forget_state(optimizer)

    def drop_gradients(self) -> None:
        """Forgets what waits for a step."""
        for parameter in self._model.parameters():
            parameter.grad = None


def _is_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that it holds are numbers; waits for them."""
    held = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    return all_finite([t for t in tensors if t.is_floating_point() or t.is_complex()])
