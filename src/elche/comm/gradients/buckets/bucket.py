"""Gradients packed into buckets: the messages in which they are reduced.

A bucket holds parameters of one dtype and device, in the order in which their
gradients appear, up to a capacity; a larger parameter gets its own bucket. Its message
is the concatenated gradients and a flag per parameter, set by every rank that has a
gradient for it. A parameter without a gradient on any rank stays without one.

With a codec, gradients are sent encoded through host memory, flags and factor
unencoded. The encoding error is kept (:meth:`Bucket.settle`) and added to the next
pass, unless this pass is discarded.

The memory of a sum is lent to ``p.grad``. As with autograd's gradients, a kept gradient
keeps its memory; if a loop drops gradients in every step, one piece serves all steps.
The memory is outside of malloc's heap, where pieces of this size would leave holes when
buckets are rebuilt.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from elche.comm.codec.coded_exchange import CodedExchange, open_coded_exchange
from elche.comm.tensors.flat import wire_dtype
from elche.comm.transport.exchange import Exchange, GlooExchange
from elche.comm.transport.host_exchange import HostExchange, open_by_hosts
from elche.comm.transport.process_group import Group

SMALL_ELEMENTS = 4096
"""Most elements of a gradient that stays unreduced, to be checked for NaN."""
WHAT = "the reduction of gradients"


@dataclass(frozen=True, slots=True)
class PassOptions:
    """Options of packing, sending and returning gradients.

    Attributes:
        cap_bytes: bucket capacity in bytes of gradients.
        keeps_strides: True to lay out messages by the parameters' strides, so that
            ``p.grad`` becomes a view of the bucket. False, if ranks differ in memory
            formats: contiguous, and the sum is copied into the gradient.
        codec: codec of float32 and half-precision gradients, with error feedback.
        keeps_sums: True to keep a copy of each sum until the next, for ranks that lack
            it after another rank's death.
    """

    cap_bytes: int
    keeps_strides: bool = True
    codec: str = "fp32"
    keeps_sums: bool = False


@final
class BucketLayout:
    """Layout of a message: concatenated gradients, and a flag per gradient.

    Args:
        parameters: parameters in the order of their gradients.
        keeps_strides: True to lay out gradients by their parameters' strides, False:
            contiguous.
        dtype: dtype of the message; None: that of the parameters, which have one.

    Attributes:
        dtype: dtype of the message; a complex number is sent as two real numbers.
        numel: number of elements of the message.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        keeps_strides: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = dtype or parameters[0].dtype
        self._parameters = parameters
        self._keeps_strides = keeps_strides
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        self._sizes = [*sizes, len(parameters)]
        self._shapes = [parameter.shape for parameter in parameters]
        self._is_plain = not any(
            p.is_complex() or not p.is_contiguous() for p in parameters
        )
        self.dtype = dtype.to_real() if dtype.is_complex else dtype
        self.numel = sum(self._sizes)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view per parameter, shaped like it, and the flags."""
        *parts, flags = flat.split(self._sizes)
        if self._is_plain:  # quick: lent memory is laid out in every pass
            return [*map(torch.Tensor.view, parts, self._shapes), flags]
        return [*self.shaped(parts), flags]

    def parts(self, residual: torch.Tensor) -> Sequence[torch.Tensor]:
        """Splits a residual, laid out like the gradients, into a flat view for each."""
        return torch.split(residual, self._sizes[:-1])

    def shaped(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of flat parts, shaped like the parameters."""
        strided = self._keeps_strides
        pairs = zip(parts, self._parameters, strict=True)
        return [_shaped_like(part, p, strided=strided) for part, p in pairs]


@final
class SumMemory:
    """Pool of private memory for the sums of one bucket.

    Args:
        numel: number of elements of a sum.
        dtype: dtype of a sum.
        device: device of a sum; other devices than the CPU use torch's allocator.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._lent: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []

    def lend(self) -> torch.Tensor:
        """Returns unused or new memory with arbitrary contents.

        A tensor's storage holds the memoryview that it was made from, and every view
        of the tensor holds its storage; so a dead memoryview means unused memory.
        """
        if self._device.type != "cpu":
            return torch.empty(self._numel, dtype=self._dtype, device=self._device)
        free: mmap.mmap | None = None
        in_use = []
        for memory, loan in self._lent:
            if loan() is not None:
                in_use.append((memory, loan))
            elif free is None:
                free = memory
        if free is None:
            size_bytes = self._numel * self._dtype.itemsize
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            free = mmap.mmap(-1, size_bytes, flags=flags)
        lent = memoryview(free)
        self._lent = [*in_use, (free, weakref.ref(lent))]
        return torch.frombuffer(lent, dtype=self._dtype, count=self._numel)


@dataclass(slots=True)
class Bucket:
    """Parameters reduced in one message, with views of contribution and sum.

    Attributes:
        parameters: parameters in the order of their gradients.
        exchange: transport of the message, set by :meth:`open`.
        sent: a view of the contribution per parameter, and the flags.
        summed: a view of the last sum per parameter, and the flags. Without a codec
            its memory is lent out as long as a view exists.
        pending: places of parameters without a gradient yet in this pass.
        missing: True if this rank lacked a gradient in this pass.
        kept: unmodified copy of the last sum if ranks may die, else None.
    """

    parameters: list[nn.Parameter]
    exchange: Exchange = field(init=False)
    sent: list[torch.Tensor] = field(default_factory=list)
    summed: list[torch.Tensor] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    missing: bool = False
    _flat: torch.Tensor | None = None
    _total: torch.Tensor | None = None
    _lender: SumMemory = field(init=False)
    _sums_apart: bool = False
    _is_summed: bool = False
    _layout: BucketLayout = field(init=False)
    _coded: CodedExchange | None = None
    _staged: bool = False
    _dropped: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the bucket's gradients in bytes."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def extra_bytes(self, kept: int) -> int:
        """Bytes that the bucket needs in addition to plain training's gradients.

        Shared memory is counted only with this rank's contribution.

        Args:
            kept: number of copies kept into the next pass if sums replace the
                contribution: own gradients, or the previous pass's sums.
        """
        kept += self.kept is not None
        copies = 1 if self._sums_apart else self._staged + kept
        return (1 + copies) * self.size_bytes + self.exchange.extra_bytes

    def open(self, group: Group, options: PassOptions) -> None:
        """Opens the exchange; a collective call."""
        first, staged = self.parameters[0], False
        self._layout = BucketLayout(
            self.parameters, keeps_strides=options.keeps_strides
        )
        dtype, device, numel = self._layout.dtype, first.device, self._layout.numel
        is_coded = options.codec != "fp32" and group.world_size > 1
        if is_coded and (wire := wire_dtype(first.dtype)) is torch.float32:
            staged = dtype is not wire or device.type != "cpu"
            exchange = open_coded_exchange(
                group,
                numel + 1,  # the factor comes last
                wire,
                options.codec,
                exact=len(self.parameters),
            )
            assert isinstance(exchange, CodedExchange)
            self._coded = exchange
        else:
            sums = 2 if options.keeps_sums else 1
            exchange = open_by_hosts(group, numel, dtype, device, sums=sums)
        self._lender = SumMemory(numel, dtype, device)
        self._sums_apart = exchange.keeps_contribution and not staged
        is_kept = options.keeps_sums and group.world_size > 1
        if is_kept and not exchange.keeps_contribution:
            self.kept = torch.zeros(numel, dtype=dtype, device=device)
        self.exchange, self._staged = exchange, staged
        if not self._sums_apart:
            self._lay_message()
            return
        self._flat = exchange.contribution(0)[:numel]
        self.sent = self._layout.views(self._flat)

    def _lay_message(self) -> None:
        """Allocates the next message and sum in memory that no gradient views."""
        self._flat, self.sent, self.summed, self._total = None, [], [], None
        if self._staged:
            flat = self._lender.lend()
        else:
            assert isinstance(self.exchange, GlooExchange)
            flat = self.exchange.renew(0, self._lender.lend)
        self._flat, self.sent = flat, self._layout.views(flat)

    @torch.no_grad()
    def send(self, scale: float) -> None:
        """Sends this rank's gradients times ``scale``; 0 sends zeros, even for NaN."""
        self.summed, self._total = [], None  # its memory may be lent again
        self._dropped = {}
        if not self._sums_apart:
            self._lay_message()
        sent, self._is_summed = self.sent, False
        flags = [0.0] * len(self.parameters)
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None or scale == 0.0:
                sent[index].zero_()
            else:
                torch.mul(parameter.grad, scale, out=sent[index])
                flags[index] = 1.0
        self.missing = not all(flags)
        if self.missing:
            sent[-1].copy_(torch.tensor(flags, device="cpu"))
        else:
            sent[-1].fill_(1.0)
        if self._staged:
            flat = self._flat
            assert flat is not None
            self.exchange.contribution(0)[: flat.numel()].copy_(flat)
        if self._coded is not None:
            self._coded.contribution(0)[-1] = scale
        self.exchange.begin(0)

    def drop_sent(self, stays: Callable[[nn.Parameter], bool]) -> None:
        """Drops large gradients that the contribution holds, if ``stays`` is False."""
        if not self._sums_apart or self._coded is not None:
            return
        for index, parameter in enumerate(self.parameters):
            is_small = parameter.numel() <= SMALL_ELEMENTS
            if parameter.grad is not None and not (is_small or stays(parameter)):
                self._dropped[index], parameter.grad = self.sent[index], None

    @torch.no_grad()
    def restore(self, scale: float) -> None:
        """Restores dropped gradients from the sent ones, divided by ``scale``."""
        for index, sent in self._dropped.items():
            self.parameters[index].grad = sent / scale

    @torch.no_grad()
    def finish(self) -> None:
        """Waits until :attr:`summed` holds the sum over all ranks.

        Raises:
            CommunicationError: the reduction failed, or a rank timed out.
        """
        if self._is_summed:
            return
        if not self._sums_apart:
            assert self._flat is not None
            self.summed, self._total = self.sent, self._flat
            found = self.exchange.finish(WHAT)
            if self._staged:
                self._total.copy_(found[: self._total.numel()])
            if self.kept is not None:
                self.kept.copy_(self._total)
        else:
            self.exchange.wait(WHAT)
            self._total = self._lender.lend()
            self.exchange.sum_into(0, self._total.numel(), self._total)
            self.summed = self._layout.views(self._total)
        if self._coded is None:
            self.exchange.release()
        self._is_summed = True

    def adopt_sums(self, group: Group, source: int, *, lacks: bool) -> None:
        """Copies the last sum to ranks that lack it; collective in a new group.

        In shared memory :meth:`finish` can still form the sum, since no rank overwrites
        its contribution before all have the sum. With several hosts, one may be a pass
        ahead, so the sum is broadcast.

        Args:
            group: group of the survivors.
            source: place of a rank that has the unmodified sum.
            lacks: True if this rank lacks the sum.
        """
        last = self.kept
        if last is None and isinstance(self.exchange, HostExchange):
            last = self.exchange.last_sum
        if last is None:  # all ranks can still form the sum
            return
        kept = last.to("cpu", copy=lacks)  # gloo may still write into the last
        group.broadcast(kept, WHAT, source)
        if lacks:
            if self.kept is None:  # this host may never receive the sum
                self.kept = torch.empty_like(last)
            self.kept.copy_(kept)
            self._total, self._is_summed = kept.to(last.device), True
            self.summed = self._layout.views(self._total)

    @property
    def is_finite(self) -> bool:
        """False if this pass's encoded sum contains NaN or Inf."""
        return self._coded is None or self._coded.is_finite

    def settle(self, *, keeps: bool) -> None:
        """Commits an encoded sum's residual, or rolls it back if not ``keeps``.

        A parameter that no rank used keeps its old residual, as its sum is dropped.
        """
        coded = self._coded
        if coded is None:
            return
        # So a rank that closes the group first cannot disturb the others.
        coded.flush(WHAT)
        if not keeps:
            coded.rollback()
            return
        unused = [index for index, used in enumerate(self.used()) if not used]
        before = self._layout.parts(coded.residual)
        coded.commit()
        after = self._layout.parts(coded.residual)
        for index in unused:
            after[index].copy_(before[index])

    def residuals(self) -> list[torch.Tensor]:
        """Copies each parameter's residual, flat in shape order; [] without a codec."""
        if self._coded is None:
            return []
        parts = self._layout.parts(self._coded.residual.clone())
        return [part.reshape(-1) for part in self._layout.shaped(parts)]

    def load_residuals(self, left: Sequence[torch.Tensor]) -> None:
        """Loads residuals that come from other buckets."""
        if self._coded is not None:
            residual = torch.cat(list(left))
            parts = self._layout.parts(residual)
            for into, part in zip(self._layout.shaped(parts), left, strict=True):
                into.copy_(part.view(into.shape))
            self._coded.load_residual(residual)

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiplies the sums, but not the flags, by a factor."""
        assert self._total is not None
        self._total[: -len(self.parameters)].mul_(factor)

    def used(self) -> list[bool]:
        """Returns a bool per parameter: True if any rank sent a gradient for it."""
        if not self.missing:  # reading flags waits for a device
            return [True] * len(self.parameters)
        return [flag != 0.0 for flag in self.summed[-1].tolist()]


def give_back_freed() -> None:
    """Returns malloc's free memory to the system, under glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _shaped_like(
    flat: torch.Tensor, parameter: torch.Tensor, *, strided: bool
) -> torch.Tensor:
    """View of ``flat`` with the parameter's shape, and with its strides if dense."""
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    if not strided or parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if a permutation of dimensions makes the tensor contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
