"""Gradients packed into buckets: the messages in which they are reduced.

A bucket holds parameters of one dtype and device, in the order in which their
gradients appear, up to a capacity; a parameter larger than that has one of its own. Its
message is their gradients one after the other and a flag per parameter, raised by every
rank that has a gradient for it: what no rank has stays without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from elche.comm.gradients.sum_memory import SumMemory
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.shared_memory import Members

SIDES = 2
WHAT = "the reduction of gradients"


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """What one bucket holds, for people and tests to look at.

    Attributes:
        index: its place in the order of reduction.
        capacity_bytes: most bytes of gradients, unless one parameter is larger.
        size_bytes: bytes of its gradients.
        names: its parameters, in the order in which their gradients are expected.
        shapes: their shapes.
        dtype: of its gradients.
        device: where its gradients are.
    """

    index: int
    capacity_bytes: int
    size_bytes: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class Bucket:
    """Parameters reduced in one message, with views of what is sent and summed.

    Attributes:
        parameters: in the order of their gradients.
        exchange: carries the message; None before :meth:`open`.
        sent: per side of the exchange, a view of the contribution per parameter.
        summed: a view of the last sum per parameter, and the flags. Where what was sent
            stays beside it, it lies in memory that is lent to whoever has a view.
        pending: parameters whose gradient has not come in this pass.
        zeros: parameters whose flag is raised in this pass though they have none.
        missing: parameters for which this rank sent no gradient in this pass.
    """

    parameters: list[nn.Parameter]
    exchange: Exchange | None = None
    sent: list[list[torch.Tensor]] = field(default_factory=list)
    summed: list[torch.Tensor] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    zeros: set[int] = field(default_factory=set)
    missing: bool = False
    _flat: list[torch.Tensor] = field(default_factory=list)
    _total: torch.Tensor | None = None
    _lender: SumMemory | None = None
    _is_summed: bool = False
    _sizes: list[int] = field(default_factory=list)
    _shapes: list[torch.Size] = field(default_factory=list)
    _is_plain: bool = False
    _staged: bool = False
    _keeps_strides: bool = True

    @property
    def size_bytes(self) -> int:
        """Bytes of its gradients."""
        return sum(size_bytes(parameter) for parameter in self.parameters)

    @property
    def keeps_contribution(self) -> bool:
        """Whether what was sent last is still there until the next but one is."""
        return self.exchange is not None and self.exchange.keeps_contribution

    def copies(self, kept: int) -> int:
        """Copies of its gradients that it holds beside those of plain training.

        A share of the memory in which ranks sum is counted as what this rank sends.

        Args:
            kept: copies that are kept until the next pass where sums replace what is
                sent.
        """
        if self._lender is not None:
            return 2
        return len(self.sent) * (1 + self._staged) + kept

    def info(self, index: int, capacity_bytes: int, names: Sequence[str]) -> BucketInfo:
        """A description, given the names of its parameters."""
        first = self.parameters[0]
        shapes = tuple(tuple(parameter.shape) for parameter in self.parameters)
        return BucketInfo(
            index=index,
            capacity_bytes=capacity_bytes,
            size_bytes=self.size_bytes,
            names=tuple(names),
            shapes=shapes,
            dtype=first.dtype,
            device=first.device,
        )

    def open(
        self, group: Members, *, staged: bool = False, keeps_strides: bool = True
    ) -> None:
        """Makes the exchange, together with all ranks.

        Args:
            group: the process group.
            staged: the message is host memory, into and out of which gradients are
                copied, because other ranks hold them on another kind of device.
            keeps_strides: a gradient lies in the message as its parameter in memory;
                False: as its shape says.
        """
        first = self.parameters[0]
        dtype, device = _real(first.dtype), first.device
        self._sizes = [*map(_real_numel, self.parameters), len(self.parameters)]
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._is_plain = not first.is_complex() and all(
            parameter.is_contiguous() for parameter in self.parameters
        )
        numel = sum(self._sizes)
        self._staged, self._keeps_strides = staged, keeps_strides
        where = torch.device("cpu") if staged else device
        self.exchange = exchange = open_exchange(
            group, numel, dtype, where, SIDES, shared_sides=1
        )
        if exchange.keeps_contribution and not staged:
            self._lender = SumMemory(numel, dtype)
        for side in range(exchange.sides):
            sent = exchange.contribution(side)
            if staged:
                sent = torch.zeros(numel, dtype=dtype, device=device)
            self._flat.append(sent)
            self.sent.append(self._views(sent))

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A view per parameter, shaped like it, and the flags."""
        *parts, flags = flat.split(self._sizes)
        if self._is_plain:  # quick: lent memory is laid out in every pass
            return [*map(torch.Tensor.view, parts, self._shapes), flags]
        strided = self._keeps_strides
        pairs = zip(parts, self.parameters, strict=True)
        return [*(_shaped_like(part, p, strided=strided) for part, p in pairs), flags]

    @torch.no_grad()
    def send(self, side: int, scale: float) -> None:
        """Writes this rank's gradients times ``scale``, and lets them go.

        With a scale of 0 zeros are sent, whatever the gradients are.
        """
        assert self.exchange is not None
        side %= len(self.sent)
        sent, self._is_summed = self.sent[side], False
        flags = [0.0] * len(self.parameters)
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None or scale == 0.0:
                sent[index].zero_()
                flags[index] = float(scale != 0.0 and index in self.zeros)
            else:
                torch.mul(parameter.grad, scale, out=sent[index])
                flags[index] = 1.0
        self.missing = not all(flags)
        if self.missing:
            sent[-1].copy_(torch.tensor(flags, device="cpu"))
        else:
            sent[-1].fill_(1.0)
        if self._staged:
            self.exchange.contribution(side).copy_(self._flat[side])
        self.summed, self._total = [], None  # its memory may be lent again
        self.exchange.begin(side)

    def reclaim(self) -> None:
        """Waits until all ranks have taken what was summed last.

        Raises:
            CommunicationError: a rank has not in time.
        """
        assert self.exchange is not None
        self.exchange.reclaim(WHAT)

    def advance(self, side: int) -> bool:
        """Sums if all contributions are there.

        Returns:
            Whether :meth:`finish` has nothing left to do.
        """
        assert self.exchange is not None
        if self._lender is None:
            self.exchange.advance()
        elif not self._is_summed and self.exchange.poll():
            self.finish(side)
        return self._is_summed

    @torch.no_grad()
    def finish(self, side: int) -> None:
        """Waits until :attr:`summed` holds the sum over all ranks.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        assert self.exchange is not None
        if self._is_summed:
            return
        side %= len(self.sent)
        if self._lender is None:
            self.summed, self._total = self.sent[side], self._flat[side]
            found = self.exchange.finish(WHAT)
            if self._staged:
                self._total.copy_(found)
        else:
            self.exchange.wait(WHAT)
            self._total = self._lender.lend()
            self.exchange.sum_into(0, self._total.numel(), self._total)
            self.exchange.release()
            self.summed = self._views(self._total)
        self._is_summed = True

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiplies the sums."""
        assert self._total is not None
        self._total[: -len(self.parameters)].mul_(factor)

    def used(self) -> list[bool]:
        """Per parameter, whether any rank sent a gradient for it."""
        if not self.missing:  # reading flags waits for a device
            return [True] * len(self.parameters)
        return [flag != 0.0 for flag in self.summed[-1].tolist()]


def make_buckets(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Buckets of parameters in the given order, one dtype and device each.

    Nothing hides the bucket that is reduced last, so the last parameters (up to a
    quarter of the cap, at least one) get one of their own.
    """
    tail, tail_bytes = len(parameters) - 1, size_bytes(parameters[-1])
    while tail > 0 and tail_bytes + size_bytes(parameters[tail - 1]) <= cap_bytes // 4:
        tail -= 1
        tail_bytes += size_bytes(parameters[tail])
    return [*_fill(parameters[:tail], cap_bytes), *_fill(parameters[tail:], cap_bytes)]


def _fill(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Consecutive parameters of one kind together, as long as they fit."""
    buckets: list[Bucket] = []
    filled = 0
    for parameter in parameters:
        last = buckets[-1].parameters[-1] if buckets else None
        same = last is not None and (last.dtype, last.device) == (
            parameter.dtype,
            parameter.device,
        )
        if not same or filled + size_bytes(parameter) > cap_bytes:
            buckets.append(Bucket([]))
            filled = 0
        buckets[-1].parameters.append(parameter)
        filled += size_bytes(parameter)
    return buckets


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _real(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a message: a complex number travels as two real ones."""
    return dtype.to_real() if dtype.is_complex else dtype


def _real_numel(tensor: torch.Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _shaped_like(
    flat: torch.Tensor, parameter: torch.Tensor, *, strided: bool
) -> torch.Tensor:
    """A view of ``flat`` with the parameter's shape, and its strides if dense."""
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    if not strided or parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a permutation of dimensions makes the tensor contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
