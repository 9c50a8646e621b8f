"""Reset of optimizers to the state before their first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Optimizers = Callable[[], Sequence[torch.optim.Optimizer]]
"""Returns the optimizers that step the model now; a loop may add some later."""


@torch.no_grad()
def forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Resets an optimizer to the state before its first step.

    Adagrad creates its state in the constructor and cannot step without it, so its sums
    are reset to their initial values.
    """
    before = dict(optimizer.state)
    optimizer.state.clear()
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    first = optimizer.defaults["initial_accumulator_value"]  # Adagrad ignores groups'
    for parameter, state in before.items():
        if not state:  # of an added parameter group: created at its first step
            continue
        state["step"].zero_()
        state["sum"].fill_(complex(first, first) if parameter.is_complex() else first)
        optimizer.state[parameter] = state
