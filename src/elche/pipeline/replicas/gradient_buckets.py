"""Gradients in flat pieces of memory, as they travel between the replicas."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import nn

from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, ConfigError

BUCKET_BYTES = 25 << 20
"""As in torch's DistributedDataParallel."""


@final
class GradientBucket:
    """Gradients in one piece of memory, and for each parameter whether it has one.

    Args:
        parameters: of this rank, of types that are summed in `dtype`.
        dtype: of the sum.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None
        self.work: Any = None
        self.begin_s = 0.0
        self.ended_s: list[float] = []

    @property
    def nbytes(self) -> int:
        """Of the message."""
        count = sum(_numel(one) for one in self._parameters) + len(self._parameters)
        return count * self._dtype.itemsize

    def begin(self, group: Group, contributes: bool) -> None:
        """Begins to sum.

        Args:
            group: of the ranks that hold these parameters.
            contributes: whether with this rank's gradients, or with zeros.

        Raises:
            ConfigError: a gradient is sparse; nothing has begun.
            CommunicationError: a connection has failed.
        """
        host = self._fill(contributes)
        self.begin_s = time.monotonic()
        ended_s: list[float] = []
        self.ended_s = ended_s
        try:
            self.work = group.all_reduce_async(host)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {group.rank} of {group.world_size} that hold a stage cannot "
                f"reduce its gradients: {error}"
            ) from error
        done = self.work.get_future()
        done.add_done_callback(lambda _: ended_s.append(time.monotonic()))

    def write(self) -> None:
        """Puts the sums where the gradients were; None where nobody had one."""
        flat, host = self._buffers()
        if flat is not host:
            flat.copy_(host)
        present = host[-len(self._parameters) :].tolist()
        for one, view, there in zip(
            self._parameters, self._views(flat), present, strict=True
        ):
            if not there:
                one.grad = None
                continue
            if one.grad is None:
                one.grad = torch.empty_like(one)
            _numbers(one.grad).copy_(view)

    def _fill(self, contributes: bool) -> torch.Tensor:
        gradients = [one.grad if contributes else None for one in self._parameters]
        sparse = [one for one in gradients if _is_sparse(one)]
        if sparse:
            raise ConfigError(
                f"a gradient of shape {list(sparse[0].shape)} is sparse, and replicas "  # type: ignore[union-attr]
                "of a pipeline sum dense ones; build the embedding with sparse=False"
            )
        flat, host = self._buffers()
        for view, gradient in zip(self._views(flat), gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(_numbers(gradient))
        there = torch.tensor([one is not None for one in gradients], device="cpu")
        flat[-len(gradients) :].copy_(there)
        if flat is not host:
            host.copy_(flat)
        return host

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """On the parameters' device, and what gloo sums."""
        if self._memory is None:
            count = self.nbytes // self._dtype.itemsize
            device = self._parameters[0].device
            flat = torch.empty(count, dtype=self._dtype, device=device)
            host = flat
            if device.type != "cpu":
                host = torch.empty(
                    count, dtype=self._dtype, pin_memory=True, device="cpu"
                )
            self._memory = flat, host
        return self._memory

    def _views(self, flat: torch.Tensor) -> Iterable[torch.Tensor]:
        begin = 0
        for one in self._parameters:
            shape = _numbers(one.detach()).shape
            yield flat[begin : begin + shape.numel()].view(shape)
            begin += shape.numel()


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[GradientBucket]:
    """By type of the sum, in order; more than a bucket's size only for one alone."""
    made: list[GradientBucket] = []
    for dtype in (torch.float32, torch.float64):
        mine: list[nn.Parameter] = []
        held_bytes = 0
        for one in parameters:
            if _sum_dtype(one.dtype) is not dtype:
                continue
            nbytes = _numel(one) * dtype.itemsize
            if mine and held_bytes + nbytes > BUCKET_BYTES:
                made.append(GradientBucket(mine, dtype))
                mine, held_bytes = [], 0
            mine.append(one)
            held_bytes += nbytes
        if mine:
            made.append(GradientBucket(mine, dtype))
    return made


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in float32, complex numbers as two real ones."""
    wide = dtype in (torch.float64, torch.complex128)
    return torch.float64 if wide else torch.float32


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _numel(parameter: nn.Parameter) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided
