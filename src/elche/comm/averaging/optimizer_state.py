"""Optimizers, taken back to where they had taken no step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Optimizers = Callable[[], Sequence[torch.optim.Optimizer]]
"""Those that step the model now: a loop may step with more than it began with."""


@torch.no_grad()
def forget_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor] | None = None
) -> None:
    """Takes an optimizer back to where it had taken no step.

    Adagrad makes its state when it is made, and cannot step without it: its sums begin
    anew.

    Args:
        optimizer: the optimizer.
        parameters: whose state is meant; None for all there is.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if parameters is None:
        before = dict(optimizer.state)
        optimizer.state.clear()
    else:
        chosen = {id(parameter) for parameter in parameters}
        held = [p for p in held if id(p) in chosen]
        before = {p: optimizer.state.pop(p, {}) for p in held}
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    first = optimizer.defaults["initial_accumulator_value"]  # whatever a group says
    for parameter in held:
        state = before.get(parameter)
        if not state:  # of a group that was added: made at its first step
            continue
        state["step"].zero_()
        state["sum"].fill_(complex(first, first) if parameter.is_complex() else first)
        optimizer.state[parameter] = state
