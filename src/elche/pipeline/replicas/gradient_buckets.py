"""Gradients in flat pieces of memory, as they travel between the replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from elche.comm.tensors.flat import shaped
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, ConfigError

BUCKET_BYTES = 25 << 20
"""Size of a bucket; as in torch's DistributedDataParallel."""


@final
class GradientBucket:
    """Gradients in one piece of memory, and a flag for each parameter that has one.

    Args:
        parameters: of this rank, of types that are summed in `dtype`.
        dtype: of the sum.

    Attributes:
        nbytes: size of the message.
        work: the sum under way.
        begin_s: when it began.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self._numel = sum(as_numbers(one.detach()).numel() for one in parameters)
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None
        self.nbytes = (self._numel + len(parameters)) * dtype.itemsize
        self.work: Any = None
        self.begin_s = 0.0

    @torch.no_grad()
    def begin(self, group: Group, contributes: bool) -> None:
        """Begins to sum.

        Args:
            group: of the ranks that hold these parameters.
            contributes: whether with this rank's gradients, or with zeros.

        Raises:
            ConfigError: a gradient is sparse; nothing has begun.
            CommunicationError: a connection has failed.
        """
        gradients = [one.grad if contributes else None for one in self._parameters]
        for one in gradients:
            if one is not None and one.layout is not torch.strided:
                raise ConfigError(
                    f"a gradient of shape {list(one.shape)} is sparse, and replicas of "
                    "a pipeline sum dense ones; build the embedding with sparse=False"
                )
        flat, host = self._buffers()
        for view, gradient in zip(self._views(flat), gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(as_numbers(gradient))
        there = torch.tensor([one is not None for one in gradients], device="cpu")
        flat[self._numel :].copy_(there)
        if flat is not host:
            host.copy_(flat)
        self.begin_s = time.monotonic()
        try:
            self.work = group.all_reduce_async(host)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {group.rank} of {group.world_size} that hold a stage cannot "
                f"reduce its gradients: {error}"
            ) from error

    @torch.no_grad()
    def write(self) -> None:
        """Replaces the gradients by the sums; by None where no rank had one."""
        flat, host = self._buffers()
        if flat is not host:
            flat.copy_(host)
        present = host[self._numel :].tolist()
        for one, view, there in zip(
            self._parameters, self._views(flat), present, strict=True
        ):
            if not there:
                one.grad = None
                continue
            if one.grad is None:
                one.grad = torch.empty_like(one)
            as_numbers(one.grad).copy_(view)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        like = [as_numbers(one.detach()) for one in self._parameters]
        return shaped(flat[: self._numel], like)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory on the parameters' device, and the memory that gloo sums."""
        if self._memory is None:
            count = self._numel + len(self._parameters)
            device = self._parameters[0].device
            flat = host = torch.empty(count, dtype=self._dtype, device=device)
            if device.type != "cpu":
                host = torch.empty(
                    count, dtype=self._dtype, pin_memory=True, device="cpu"
                )
            self._memory = flat, host
        return self._memory


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[GradientBucket]:
    """By type of the sum, in order; more than a bucket's size only for one alone.

    Half precision is summed in float32, complex numbers as two real ones.
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
                made.append(GradientBucket(mine, dtype))
                mine, held_bytes = [], 0
            mine.append(one)
            held_bytes += nbytes
        if mine:
            made.append(GradientBucket(mine, dtype))
    return made


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
