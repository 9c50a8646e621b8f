"""Broadcast of model and optimizer state from the rank that trained alone.

Parameters are equal by then, except for rounding on different kinds of devices.
Optimizer state is not: the other ranks took no step.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elche.checkpoint.files import packed_tensors, unpacked_tensors
from elche.checkpoint.state_transfer import send
from elche.checkpoint.state_tree import decode, encode
from elche.comm.model_buffers.known_buffers import KnownBuffers
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError
from elche.runtime.rank_settings import plain_settings
from elche.runtime.watch.rate_watch import is_scheduled

_CPU = torch.device("cpu")
_SETTING = int, float, tuple, torch.Tensor


def rates(
    optimizers: Sequence[torch.optim.Optimizer],
    rank: int,
    followed: Sequence[torch.optim.Optimizer] = (),
) -> str:
    """Digest of optimizer settings; if equal, equal states take equal steps.

    Rates that `elche.ProgressLR` or a registered scheduler sets follow the run's
    progress, and are omitted. A rate that another torch scheduler sets depends on this
    rank's loop, so its text differs from every other rank's.

    Args:
        optimizers: optimizers that step the model.
        rank: this rank.
        followed: optimizers with a registered scheduler.
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

    Ranks have equal numbers of optimizers with equal settings: :func:`rates` has been
    compared. Buffers whose shapes differ between ranks (growing caches) stay local.

    Raises:
        CommunicationError: a rank did not arrive in time.
    """
    _take(group, model.parameters(), source)
    known = KnownBuffers(model)
    known.agree(group)
    _take(group, (buffer for _, _, buffer in known.common()), source)
    for optimizer in optimizers:
        _take_state(group, optimizer, source)


def take_step(
    group: Group,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    source: int,
) -> None:
    """Copies parameters and optimizer state after one rank's step to all.

    Raises:
        CommunicationError: a rank did not arrive in time.
    """
    _take(group, parameters, source)
    _take_state(group, optimizer, source)


@torch.no_grad()
def take_gradients(
    group: Group, parameters: Sequence[nn.Parameter], source: int
) -> None:
    """Copies one rank's ``p.grad`` to all ranks, None included.

    Raises:
        CommunicationError: a rank did not arrive in time.
    """
    for parameter in parameters:
        own, device = {"grad": parameter.grad}, parameter.device
        _fill(own, _sent(group, dict(own), source), device, device)
        parameter.grad = own["grad"]


def take_schedules(
    group: Group, schedulers: Sequence[LRScheduler], source: int
) -> None:
    """Copies the progress of schedulers (see `plain_schedule`) of one rank to all.

    Raises:
        CommunicationError: a rank did not arrive in time.
    """
    held = _sent(group, [plain_schedule(each) for each in schedulers], source)
    for scheduler, state in zip(schedulers, held, strict=True):
        scheduler.load_state_dict({**scheduler.state_dict(), **state})


def plain_schedule(scheduler: LRScheduler) -> dict[str, Any] | None:
    """State of a scheduler if JSON keeps it exactly; else None.

    Its constructor's tuples and counters (milestones, say) are on every rank.
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


@torch.no_grad()
def _take_state(group: Group, optimizer: torch.optim.Optimizer, source: int) -> None:
    """Copies settings (learning rates change) and each parameter's state."""
    for mine in optimizer.param_groups:
        plain = {n: v for n, v in mine.items() if isinstance(v, _SETTING)}
        _fill(mine, _sent(group, plain, source))
        for parameter in mine["params"]:
            held = _sent(group, optimizer.state.get(parameter, {}), source)
            if held or parameter in optimizer.state:
                is_beside = mine.get("capturable") or mine.get("fused")
                counts_on = parameter.device if is_beside else _CPU
                own = optimizer.state[parameter]
                for name in own.keys() - held.keys():
                    del own[name]
                _fill(own, held, parameter.device, counts_on)


def _fill(
    own: dict[str, Any],
    held: dict[str, Any],
    device: torch.device = _CPU,
    counts_on: torch.device = _CPU,
) -> None:
    """Stores the values, in place for an existing tensor."""
    for name, value in held.items():
        mine = own.get(name)
        if not isinstance(value, torch.Tensor):
            own[name] = value
        elif isinstance(mine, torch.Tensor) and mine.shape == value.shape:
            mine.copy_(value)
        else:
            own[name] = value.to(device if value.dim() else counts_on)


def _sent(group: Group, value: Any, source: int) -> Any:
    """Sends one rank's numbers, texts and tensors to all ranks, to the bit.

    Raises:
        ConfigError: the value holds something else; raised on every rank.
    """
    messages = _packed(value) if group.rank == source else None
    text, raw = send(group, source, messages, keeps=True)
    content = json.loads(text)
    if "error" in content:
        raise ConfigError(
            "expected an optimizer state of numbers, texts and tensors on the rank "
            f"that trained: {content['error']}; keep all ranks in every step with "
            "leave_out=False"
        )
    if group.rank == source:
        return value
    tensors = unpacked_tensors(raw)
    return decode(content["state"], lambda name, _: tensors[name])


def _packed(value: Any) -> list[bytearray]:
    try:
        tree, tensors = encode(value)
    except ConfigError as error:
        return [bytearray(json.dumps({"error": str(error)}).encode()), bytearray()]
    return [bytearray(json.dumps({"state": tree}).encode()), packed_tensors(tensors)]


@torch.no_grad()
def _take(group: Group, tensors: Iterable[torch.Tensor], source: int) -> None:
    """Copies tensors of one rank to all, to the bit where ranks hold one dtype."""
    for tensor in tensors:
        tensor.copy_(_sent(group, tensor.detach(), source))
