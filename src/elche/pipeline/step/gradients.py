"""Gradient operations over all stages: norm and finiteness."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Set
from types import FrameType
from typing import Any

import torch
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.checkpoints.named_states import only_optimizer
from elche.pipeline.peers.communicator import PipelineCommunicator, common
from elche.pipeline.step.inputs import number_of, scale_of


def refuse_norm_of_rank(frame: FrameType | None) -> None:
    """Raises ConfigError if torch's `clip_grad_norm_` is the caller in this frame."""
    code = frame.f_back.f_code if frame is not None and frame.f_back else None
    if code is inspect.unwrap(nn.utils.clip_grad_norm_).__code__:
        raise ConfigError(
            "torch's clip_grad_norm_ sees the gradients of one rank's layers alone; "
            "call pipe.clip_grad_norm_(max_norm) on every rank"
        )


def clip_norm(
    parameters: Iterable[nn.Parameter],
    copies: Set[int],
    max_norm: Any,
    communicator: PipelineCommunicator,
) -> float:
    """Implements `Pipeline.clip_grad_norm_`, which all ranks call together.

    `copies` has the ids of shared parameters that another rank counts. An error leaves
    all gradients unchanged.
    """
    mine = [one for one in parameters if one.grad is not None]

    def measure() -> list[float]:
        most = number_of(max_norm, "max_norm")
        if math.isnan(most) or most < 0:
            raise ConfigError(f"expected a max_norm of at least 0, got {max_norm!r}")
        norms = [
            float(one.grad.detach().double().norm())
            for one in mine
            if one.grad is not None and id(one) not in copies
        ]
        return [most, sum(norm**2 for norm in norms)]

    reports = communicator.agree(measure, "clip_grad_norm_")
    most = common([one for one, _ in reports], "max_norm")
    norm = math.sqrt(math.fsum(squares for _, squares in reports))
    scale = most / (norm + 1e-6)
    if not scale >= 1.0:  # a NaN norm makes all gradients NaN, as in torch
        for one in mine:
            if one.grad is not None:
                one.grad.mul_(scale)
    return norm


def unscale(
    parameters: Iterable[nn.Parameter],
    loss_scale: Any,
    optimizer: torch.optim.Optimizer | None,
    communicator: PipelineCommunicator,
) -> bool:
    """Implements `Pipeline.unscale_`, which all ranks call together.

    An error leaves all gradients unchanged.
    """
    if isinstance(loss_scale, torch.amp.GradScaler):
        given = only_optimizer(optimizer)
        return _unscale_by(loss_scale, given, parameters, communicator)
    reports = communicator.agree(lambda: scale_of(loss_scale), "unscale_")
    scale, finite = common(reports, "loss_scale"), True
    for one in parameters:
        if one.grad is not None:
            one.grad.div_(scale)
            finite = finite and bool(one.grad.isfinite().all())
    return all(communicator.exchange(finite, "whether the gradients are finite"))


def _unscale_by(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    communicator: PipelineCommunicator,
) -> bool:
    """Unscales by a GradScaler; returns True if the gradients of all ranks are finite.

    If only other ranks have non-finite gradients, this rank sets its first gradient to
    infinity. Its scaler then also skips the step, and all ranks' scales stay equal.
    """
    parameters = list(parameters)
    if all(one.grad is None for one in parameters):  # the scaler requires a gradient
        for one in parameters:
            one.grad = torch.zeros_like(one.data)
    gradients = [one.grad for one in parameters if one.grad is not None]
    mine = all(bool(one.isfinite().all()) for one in gradients)
    reports = communicator.agree(lambda: [scaler.get_scale(), mine], "unscale_")
    common([scale for scale, _ in reports], "loss_scale")
    finite = all(one for _, one in reports)
    if not finite and mine and gradients:
        gradients[0].fill_(math.inf)
    for first in gradients[:1]:
        scaler.scale(torch.zeros((), device=first.device))  # initialises the scaler
    scaler.unscale_(optimizer)
    return finite
