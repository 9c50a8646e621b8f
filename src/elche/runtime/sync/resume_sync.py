"""Broadcast of model and optimizer state from the rank that trained alone.

Parameters are equal by then, up to how each kind of device rounds. The optimizer's
state is not: the other ranks took no step.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elche.comm.averaging.optimizer_state import forget_state
from elche.comm.model_buffers.known_buffers import KnownBuffers
from elche.comm.transport.process_group import Group, gather_texts
from elche.runtime.rank_settings import plain_settings, state_tensors
from elche.runtime.watch.rate_watch import is_scheduled

logger = logging.getLogger(__name__)

WHAT = "taking over from the rank that trained alone"
_NUMBER = int, float


def rates(
    optimizers: Sequence[torch.optim.Optimizer],
    rank: int,
    followed: Sequence[torch.optim.Optimizer] = (),
) -> str:
    """Names what optimizers step with: equal texts, equal steps from equal states.

    A rate that `elche.ProgressLR` sets follows the run's progress, so it is equal when
    it is used, and left out; so does one whose scheduler was handed over. One that
    another scheduler of torch's sets depends on how often this rank's loop has called
    it, so such a text is like no other rank's.

    Args:
        optimizers: those that step the model.
        rank: this one.
        followed: those whose schedulers were handed over.
    """
    unknown = (each for each in optimizers if each not in followed)
    if any(is_scheduled(each) for each in unknown):
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


def take_step(
    group: Group,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    source: int,
) -> None:
    """Copies what one rank's step has made of parameters and state to all.

    Raises:
        CommunicationError: a rank did not arrive in time.
    """
    for parameter in parameters:
        _take(group, parameter.detach(), source, parameter.dtype)
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


def take_schedules(
    group: Group, schedulers: Sequence[LRScheduler], source: int
) -> None:
    """Copies the progress of schedulers (see `plain_schedule`) of one rank to all.

    Raises:
        CommunicationError: a rank did not arrive in time.
    """
    own = [plain_schedule(each) for each in schedulers]
    text = json.dumps(own) if group.rank == source else ""
    held = json.loads(gather_texts(group, text, WHAT)[source])
    for scheduler, state in zip(schedulers, held, strict=True):
        scheduler.load_state_dict({**scheduler.state_dict(), **state})


def plain_schedule(scheduler: LRScheduler) -> dict[str, Any] | None:
    """State of a scheduler if JSON keeps it exactly; else None.

    What it was made with (milestones, say) every rank has.
    """
    plain: dict[str, Any] = {}
    for name, value in scheduler.state_dict().items():
        try:
            is_exact = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            is_exact = False
        if is_exact:
            plain[name] = value
        elif not isinstance(value, Counter | tuple):
            return None
    return plain


def _take_state(group: Group, optimizer: torch.optim.Optimizer, source: int) -> None:
    held = [p for each in optimizer.param_groups for p in each["params"]]
    own = {
        "settings": [_settings(each) for each in optimizer.param_groups],
        "states": [_described(optimizer.state.get(each, {})) for each in held],
    }
    told = [json.loads(text) for text in gather_texts(group, json.dumps(own), WHAT)]
    states = told[source]["states"]
    if all(all(map(_fits, each["states"], states)) for each in told):
        for parameter, state in zip(held, states, strict=True):
            if state:
                _fill(optimizer.state[parameter], state, parameter.device)
    else:
        logger.warning(
            "the optimizer's state differs in kind between ranks after rank %d trained "
            "without others; it is forgotten on all of them",
            source,
        )
        forget_state(optimizer)
    for tensor in state_tensors(optimizer):
        _take(group, tensor.detach(), source, tensor.dtype)
    for mine, settings in zip(
        optimizer.param_groups, told[source]["settings"], strict=True
    ):
        for name, value in settings.items():
            if isinstance(mine[name], torch.Tensor):
                mine[name].fill_(value)
            else:
                mine[name] = tuple(value) if isinstance(value, list) else value


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a group: the rate, and what else a scheduler may have moved."""
    plain: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor):
            plain[name] = value.item()
        elif isinstance(value, _NUMBER):
            plain[name] = value
        elif isinstance(value, tuple) and all(isinstance(v, _NUMBER) for v in value):
            plain[name] = list(value)
    return plain


def _described(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state as JSON has it, without the values of tensors."""
    return {name: _word_for(value) for name, value in state.items()}


def _word_for(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "is_count": not value.shape and value.device.type == "cpu",
        }
    is_plain = value is None or isinstance(value, (*_NUMBER, str))
    return value if is_plain else {"object": repr(value)}


def _fits(own: dict[str, Any], state: dict[str, Any]) -> bool:
    """Returns True if a state can be filled with another one, or made of it."""
    if not own:  # not trained while this rank took part: unfrozen, or added, since
        return not any(_kind_of(word)[0] == "object" for word in state.values())
    kinds = ({n: _kind_of(word) for n, word in each.items()} for each in (own, state))
    return next(kinds) == next(kinds)


def _kind_of(word: Any) -> tuple[str, Any]:
    if isinstance(word, dict):
        kind = "object" if "object" in word else "shape"
        return kind, word[kind]
    return ("number", type(word).__name__) if isinstance(word, _NUMBER) else ("", word)


def _fill(own: dict[str, Any], state: dict[str, Any], device: torch.device) -> None:
    """Takes numbers, and makes tensors that are missing, without their values."""
    is_new = not own
    for name, word in state.items():
        if not isinstance(word, dict):
            own[name] = word
        elif is_new:
            where = torch.device("cpu") if word["is_count"] else device
            kind = getattr(torch, word["dtype"])
            own[name] = torch.zeros(word["shape"], dtype=kind, device=where)


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
