"""Gradients in flat buckets, summed over the ranks that hold the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from elche.comm.tensors.flat import shaped
from elche.comm.transport.exchange import GlooExchange, open_exchange
from elche.comm.transport.process_group import Group
from elche.devices.streams import host_memory
from elche.errors import CommunicationError, ConfigError

BUCKET_BYTES = 25 << 20
"""Size of a bucket in bytes; as in torch's DistributedDataParallel."""


@final
class GradientBucket:
    """Gradients in one flat buffer, with a flag per parameter that has a gradient.

    Args:
        parameters: parameters of this rank whose dtypes are summed in `dtype`.
        dtype: dtype of the sum.
        group: process group of the ranks that hold these parameters; all of them make
            the bucket.

    Attributes:
        exchange: all-reduce of the buffer.
    """

    def __init__(
        self, parameters: list[nn.Parameter], dtype: torch.dtype, group: Group
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._numel = sum(as_numbers(one.detach()).numel() for one in parameters)
        count, cpu = self._numel + len(parameters), torch.device("cpu")
        self.exchange = open_exchange(group, count, dtype, cpu)
        if isinstance(self.exchange, GlooExchange):
            device = parameters[0].device
            self.exchange.renew(0, lambda: host_memory((count,), dtype, device))

    @torch.no_grad()
    def begin(self, contributes: bool) -> None:
        """Starts the all-reduce.

        Args:
            contributes: whether this rank adds its gradients, or zeros.

        Raises:
            ConfigError: a gradient is sparse; nothing has started.
            CommunicationError: a connection has failed.
        """
        gradients = [one.grad if contributes else None for one in self._parameters]
        for one in gradients:
            if one is not None and one.layout is not torch.strided:
                raise ConfigError(
                    f"a gradient of shape {list(one.shape)} is sparse, and ranks that "
                    "hold a parameter together sum dense ones; build the embedding "
                    "with sparse=False"
                )
        self.exchange.reclaim("the end of the last sum")
        flat = self.exchange.contribution(0)
        like = [as_numbers(one.detach()) for one in self._parameters]
        for view, gradient in zip(
            shaped(flat[: self._numel], like), gradients, strict=True
        ):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(as_numbers(gradient))
        flat[self._numel :] = torch.tensor(
            [one is not None for one in gradients], device="cpu"
        )
        try:
            self.exchange.begin(0)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._group.rank} of {self._group.world_size} that hold a "
                f"stage cannot reduce its gradients: {error}"
            ) from error

    @torch.no_grad()
    def write(self) -> None:
        """Replaces the gradients by the sums; by None if no rank had a gradient."""
        at = self._numel
        present = self._sum(at, at + len(self._parameters)).tolist()
        at = 0
        for one, there in zip(self._parameters, present, strict=True):
            stop = at + as_numbers(one.detach()).numel()
            if not there:
                one.grad = None
            else:
                if one.grad is None:
                    one.grad = torch.empty_like(one)
                numbers = as_numbers(one.grad)
                numbers.copy_(self._sum(at, stop).view(numbers.shape))
            at = stop
        self.exchange.release()

    def _sum(self, start: int, stop: int) -> torch.Tensor:
        found = self.exchange.contribution(0).new_empty(stop - start)
        self.exchange.sum_into(start, stop, found)
        return found


def make_buckets(
    parameters: Sequence[nn.Parameter], group: Group
) -> list[GradientBucket]:
    """Groups parameters into buckets by the dtype of the sum, in order.

    Only a single parameter may exceed a bucket's size. Half precision is summed in
    float32, complex numbers as two real ones.
    """
    made: list[GradientBucket] = []
    for dtype in (torch.float32, torch.float64):
        mine: list[nn.Parameter] = []
        held_bytes = 0
        for one in parameters:
            is_wide = one.dtype in (torch.float64, torch.complex128)
            if is_wide != (dtype is torch.float64):
                continue
            nbytes = as_numbers(one.detach()).numel() * dtype.itemsize
            if mine and held_bytes + nbytes > BUCKET_BYTES:
                made.append(GradientBucket(mine, dtype, group))
                mine, held_bytes = [], 0
            mine.append(one)
            held_bytes += nbytes
        if mine:
            made.append(GradientBucket(mine, dtype, group))
    return made


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """View of the tensor, with complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
