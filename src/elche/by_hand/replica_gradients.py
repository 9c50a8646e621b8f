"""Gradients of one model, weighted and summed over all ranks in one message per dtype.

No overlap with backward: the loop makes the call. Out of place: until all ranks' parts
are here, a rank's own gradients stay as they are. Half precisions are summed in single.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError


@dataclass(slots=True)
class _Message:
    """Parameters whose gradients travel together; a flag per parameter at the end."""

    parameters: list[torch.nn.Parameter]
    exchange: Exchange

    def fill(self, side: int, weight: float) -> None:
        """Writes this rank's part. Weight zero sends zeros, never 0 times a value."""
        flat, at = self.exchange.contribution(side), 0
        flags = [0.0] * len(self.parameters)
        for index, parameter in enumerate(self.parameters):
            part = flat[at : at + _numel(parameter)]
            if weight and parameter.grad is not None:
                gradient = _as_real(parameter.grad.resolve_conj())
                part.view(gradient.shape).copy_(gradient)
                part.mul_(weight)
                flags[index] = 1.0
            else:
                part.zero_()
            at += part.numel()
        flat[at:].copy_(torch.tensor(flags, dtype=flat.dtype, device="cpu"))

    def hand_out(self, total: torch.Tensor) -> None:
        """Gives each parameter that any rank used its mean gradient."""
        at = 0
        flags = total[total.numel() - len(self.parameters) :].tolist()
        for flag, parameter in zip(flags, self.parameters, strict=True):
            mean = total[at : at + _numel(parameter)]
            at += mean.numel()
            if not flag:
                parameter.grad = None
                continue
            if parameter.grad is None or parameter.grad.is_conj():
                parameter.grad = torch.empty_like(parameter)
            gradient = _as_real(parameter.grad)
            gradient.copy_(mean.view(gradient.shape))


@final
class GradientExchange:
    """Reduces the gradients of one model on request.

    Args:
        group: all ranks; they build and reduce together.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._messages: list[_Message] = []
        self._side = 0

    def build(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Makes the messages for these parameters, together with all ranks."""
        self._messages = []
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(_sum_dtype(parameter), []).append(parameter)
        for dtype, members in by_dtype.items():
            numel = sum(_numel(p) for p in members) + len(members)
            exchange = open_exchange(
                self._group, numel, dtype, torch.device("cpu"), sides=2
            )
            self._messages.append(_Message(members, exchange))

    @torch.no_grad()
    def reduce(self, weight: float, what: str) -> None:
        """Makes every ``p.grad`` the weighted sum over ranks.

        A parameter that no rank of positive weight has a gradient of has none after.

        Args:
            weight: of this rank; over all ranks they sum to one.
            what: for errors.

        Raises:
            CommunicationError: a rank did not arrive in time.
        """
        self._side = 1 - self._side
        for message in self._messages:
            message.fill(self._side, weight)
            message.exchange.begin(self._side)
        totals = [message.exchange.finish(what) for message in self._messages]
        for message, total in zip(self._messages, totals, strict=True):
            message.hand_out(total)


def check_gradients(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Refuses gradients that cannot be summed in a flat message.

    Raises:
        ConfigError: names the parameter.
    """
    for name, parameter in named:
        grad = parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise ConfigError(
                f"{name}: sparse gradients cannot be reduced; use sparse=False"
            )


def _sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    is_double = parameter.dtype in (torch.float64, torch.complex128)
    return torch.float64 if is_double else torch.float32


def _numel(parameter: torch.Tensor) -> int:
    """Real numbers in it: a complex one is two."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _as_real(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
