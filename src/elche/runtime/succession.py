"""One rank has trained alone; now all train in step again, from where it stands.

Parameters are equal by then, up to how each kind of device rounds. The optimizer's
state is not: the other ranks took no step.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch
from torch import nn

from elche.comm.process_group import Group, gather_texts
from elche.runtime.agreement import plain_settings, state_layout, state_tensors

logger = logging.getLogger(__name__)

WHAT = "taking over from the rank that trained alone"


def rates(optimizer: torch.optim.Optimizer, rank: int) -> str:
    """Names what an optimizer steps with: equal texts, equal steps from equal states.

    A rate that `elche.ProgressLR` sets follows the run's progress, so it is equal when
    it is used, and left out. One that a scheduler of torch's sets depends on how often
    this rank's loop has called it, so such a text is like no other rank's.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return f"scheduled on rank {rank}"
    settings = [
        [
            (name, value)
            for name, value in plain_settings(group)
            if not (name == "lr" and "initial_lr" in group)
        ]
        for group in optimizer.param_groups
    ]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def take_over(
    group: Group, model: nn.Module, optimizer: torch.optim.Optimizer, source: int
) -> None:
    """Copies model, optimizer state and learning rates of one rank to all.

    Where ranks hold different kinds of state, which cannot be copied from one to the
    other, the optimizer forgets its state on all of them.

    Raises:
        CommunicationError: not everybody came in time.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        _take(group, tensor.detach(), source)
    texts = gather_texts(group, json.dumps(_description(optimizer)), WHAT)
    described = [json.loads(text) for text in texts]
    if any(each["state"] != described[0]["state"] for each in described):
        logger.warning(
            "the optimizer's state differs in kind between ranks after rank %d trained "
            "alone; it is forgotten on all of them",
            source,
        )
        optimizer.state.clear()
    for tensor in state_tensors(optimizer):
        _take(group, tensor.detach(), source)
    for own, rate in zip(
        optimizer.param_groups, described[source]["rates"], strict=True
    ):
        if isinstance(own["lr"], torch.Tensor):
            own["lr"].fill_(rate)
        else:
            own["lr"] = rate


def _description(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Learning rates, names and shapes of the state, and what of it is no tensor."""
    others = [
        [name, repr(value)]
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
        if not isinstance(value, torch.Tensor)
    ]
    return {
        "rates": [float(group["lr"]) for group in optimizer.param_groups],
        "state": [state_layout(optimizer), others],
    }


@torch.no_grad()
def _take(group: Group, tensor: torch.Tensor, source: int) -> None:
    """Every rank holds the same bits after it."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = torch.uint8 if values.dtype == torch.bool else values.dtype
    message = values.to("cpu", kind, copy=True).contiguous()
    if group.rank != source:
        message.zero_()
    group.all_reduce(message, WHAT)
    values.copy_(message)
