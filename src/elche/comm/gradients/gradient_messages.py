"""Gradients summed over ranks in flat messages, for loops that own their passes.

A message holds the gradients of some parameters, and a flag for each that has one. It
is out of place: a rank's gradients stay unchanged until all parts have arrived. Half
precision is summed in float32, complex numbers as two real ones. The messages take the
memory of one more copy of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import BucketLayout
from elche.comm.transport.exchange import GlooExchange, open_exchange
from elche.comm.transport.process_group import Group
from elche.devices.choice import CPU
from elche.devices.streams import host_memory
from elche.errors import CommunicationError, ConfigError

MESSAGE_BYTES = 25 << 20
"""Most bytes of a message of several parameters; as in torch's DDP."""


@final
class GradientMessage:
    """Gradients of some parameters in one message; a collective call.

    Args:
        parameters: parameters of this rank whose gradients are summed in `dtype`.
        dtype: dtype of the sum.
        group: process group of the ranks that hold these parameters.

    Attributes:
        exchange: all-reduce of the message.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, group: Group
    ) -> None:
        self._parameters, self._group = parameters, group
        self._layout = BucketLayout(parameters, keeps_strides=False, dtype=dtype)
        count = self._layout.numel
        self.exchange = open_exchange(group, count, dtype, CPU)
        if isinstance(self.exchange, GlooExchange):
            device = parameters[0].device
            self.exchange.renew(0, lambda: host_memory((count,), dtype, device))

    @torch.no_grad()
    def begin(self, weight: float) -> None:
        """Begins to sum this rank's gradients times a weight; 0 sends zeros.

        Raises:
            ConfigError: a gradient is sparse; nothing has begun.
            CommunicationError: a connection has failed.
        """
        gradients = [one.grad if weight else None for one in self._parameters]
        for one in gradients:
            if one is not None and one.layout is not torch.strided:
                raise ConfigError(
                    f"a gradient of shape {list(one.shape)} is sparse, but ranks that "
                    "share a parameter sum dense gradients; build the embedding with "
                    "sparse=False"
                )
        self.exchange.reclaim("the end of the last sum")
        *parts, flags = self._layout.views(self.exchange.contribution(0))
        for flag, part, gradient in zip(flags, parts, gradients, strict=True):
            flag.fill_(gradient is not None)
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient).mul_(weight)
        try:
            self.exchange.begin(0)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._group.rank} of {self._group.world_size} that hold a "
                f"parameter cannot reduce its gradient: {error}"
            ) from error

    @torch.no_grad()
    def write(self) -> None:
        """Replaces the gradients by the arrived sums; by None if no rank has one."""
        total = torch.empty(self._layout.numel, dtype=self._layout.dtype, device="cpu")
        self.exchange.sum_into(0, total.numel(), total)
        self.exchange.release()
        *sums, flags = self._layout.views(total)
        present = flags.tolist()
        for is_there, one, value in zip(present, self._parameters, sums, strict=True):
            if not is_there:
                one.grad = None
                continue
            if one.grad is None or one.grad.is_conj():
                one.grad = torch.empty_like(one)
            one.grad.copy_(value)


def make_messages(
    parameters: Sequence[nn.Parameter], group: Group
) -> list[GradientMessage]:
    """Packs parameters into messages by the dtype of the sum, in order; collective.

    Only a single parameter may exceed a message's size. Complex ones come first: torch
    views only even offsets as complex.
    """
    made: list[GradientMessage] = []
    parameters = sorted(parameters, key=lambda one: not one.is_complex())
    for dtype in (torch.float32, torch.float64):
        mine, held_bytes = list[nn.Parameter](), 0
        for one in parameters:
            is_wide = one.dtype in (torch.float64, torch.complex128)
            if is_wide != (dtype is torch.float64):
                continue
            nbytes = one.numel() * dtype.itemsize * (2 if one.is_complex() else 1)
            if mine and held_bytes + nbytes > MESSAGE_BYTES:
                made.append(GradientMessage(mine, dtype, group))
                mine, held_bytes = [], 0
            mine.append(one)
            held_bytes += nbytes
        if mine:
            made.append(GradientMessage(mine, dtype, group))
    return made
