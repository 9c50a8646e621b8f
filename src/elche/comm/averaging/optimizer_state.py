"""Optimizers, taken back to where they had taken no step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Optimizers = Callable[[], Sequence[torch.optim.Optimizer]]
"""Those that step the model now: a loop may step with more than it began with."""


@torch.no_grad()
def forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Takes an optimizer back to where it had taken no step.

    Adagrad makes its state when it is made, and cannot step without it: its sums begin
    anew.
    """
    before = dict(optimizer.state)
    optimizer.state.clear()
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    first = optimizer.defaults["initial_accumulator_value"]  # whatever a group says
    for parameter, state in before.items():
        if not state:  # of a group that was added: made at its first step
            continue
        state["step"].zero_()
        state["sum"].fill_(complex(first, first) if parameter.is_complex() else first)
        optimizer.state[parameter] = state
