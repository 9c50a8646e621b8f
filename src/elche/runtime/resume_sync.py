"""Broadcast of model and optimizer state from the rank that trained alone.

Parameters are equal by then, up to how each kind of device rounds. The optimizer's
state is not: the other ranks took no step.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.averaging.optimizer_state import forget_state
from elche.comm.model_buffers.known_buffers import KnownBuffers
from elche.comm.transport.process_group import Group, gather_texts
from elche.runtime.rank_settings import plain_settings, state_layout, state_tensors

logger = logging.getLogger(__name__)

WHAT = "taking over from the rank that trained alone"


def rates(optimizers: Sequence[torch.optim.Optimizer], rank: int) -> str:
    """Names what optimizers step with: equal texts, equal steps from equal states.

    A rate that `elche.ProgressLR` sets follows the run's progress, so it is equal when
    it is used, and left out. One that a scheduler of torch's sets depends on how often
    this rank's loop has called it, so such a text is like no other rank's.
    """
    if any("step" in vars(each) and _is_scheduled(each) for each in optimizers):
        return f"scheduled on rank {rank}"
    settings = [
        [
            [
                (name, value)
                for name, value in plain_settings(group)
                if not (name == "lr" and "initial_lr" in group)
            ]
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    return any("initial_lr" in group for group in optimizer.param_groups)


def broadcast_from(
    group: Group,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    source: int,
) -> None:
    """Copies model, optimizers' states and learning rates of one rank to all.

    Ranks have as many optimizers, with equal settings: :func:`rates` has been compared.

    Buffers that ranks do not hold alike (caches that grow) stay each rank's own. Where
    ranks hold different kinds of state, which cannot be copied from one to the
    other, the optimizer forgets its state on all of them.

    Raises:
        CommunicationError: a rank did not arrive in time.
    """
    for parameter in model.parameters():
        _take(group, parameter.detach(), source, parameter.dtype)
    known = KnownBuffers(model)
    known.agree(group)
    for _, kind, buffer in known.common():
        _take(group, buffer.detach(), source, kind.dtype)
    for optimizer in optimizers:
        _take_state(group, optimizer, source)


def take_gradients(
    group: Group, parameters: Sequence[nn.Parameter], source: int
) -> None:
    """Copies one rank's ``p.grad`` to all, also that there is none.

    Raises:
        CommunicationError: a rank did not arrive in time.
    """
    flags = "".join(str(int(p.grad is not None)) for p in parameters)
    held = gather_texts(group, flags, WHAT)[source]
    for parameter, flag in zip(parameters, held, strict=True):
        if flag == "0":
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _take(group, parameter.grad, source, parameter.grad.dtype)


def _take_state(group: Group, optimizer: torch.optim.Optimizer, source: int) -> None:
    texts = gather_texts(group, json.dumps(_description(optimizer)), WHAT)
    described = [json.loads(text) for text in texts]
    if any(each["kinds"] != described[0]["kinds"] for each in described):
        logger.warning(
            "the optimizer's state differs in kind between ranks after rank %d trained "
            "alone; it is forgotten on all of them",
            source,
        )
        forget_state(optimizer)
    else:
        counted = iter(described[source]["counted"])
        for state, name in _counted(optimizer):
            state[name] = next(counted)
    for tensor in state_tensors(optimizer):
        _take(group, tensor.detach(), source, tensor.dtype)
    for own, rate in zip(
        optimizer.param_groups, described[source]["rates"], strict=True
    ):
        if isinstance(own["lr"], torch.Tensor):
            own["lr"].fill_(rate)
        else:
            own["lr"] = rate


def _description(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Learning rates, numbers in the state, and of what kind all of it is."""
    others = [
        [name, type(value).__name__ if _is_number(value) else repr(value)]
        for state in _states(optimizer)
        for name, value in sorted(state.items())
        if not isinstance(value, torch.Tensor)
    ]
    return {
        "rates": [float(group["lr"]) for group in optimizer.param_groups],
        "kinds": [state_layout(optimizer), others],
        "counted": [state[name] for state, name in _counted(optimizer)],
    }


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The state of every parameter, in their order."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state.get(parameter, {}) for parameter in held]


def _counted(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], str]]:
    """Where the state holds plain numbers, such as a count of steps."""
    return [
        (state, name)
        for state in _states(optimizer)
        for name in sorted(state)
        if _is_number(state[name])
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


@torch.no_grad()
def _take(group: Group, tensor: torch.Tensor, source: int, dtype: torch.dtype) -> None:
    """Every rank holds the same after it, to the bit where it has that dtype."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = torch.uint8 if dtype == torch.bool else dtype.to_real()
    message = values.to("cpu", kind, copy=True).contiguous()
    if group.rank != source:
        message.zero_()
    group.all_reduce(message, WHAT)
    values.copy_(message)
