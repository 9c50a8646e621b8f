"""Differentiable gather of all ranks' rows, with unequal numbers of rows.

Gradients of rank r are reduced with weight w_r, so the common loss is the sum of
w_r L_r over ranks, up to a common factor. A row affects the losses of all ranks: its
gradient is the sum of w_s dL_s over ranks s. Later the reduction multiplies this rank's
gradients by w_r, so backward divides the sum by w_r. Whether every rank computes the
mean loss of all rows or of its own rows, the reduction yields the gradient of the whole
batch's loss.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.autograd.function import once_differentiable

from elche.comm.transport.process_group import Group, gather_texts
from elche.errors import MismatchError
from elche.torch_internals.held import disable_dynamo

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class RowParts:
    """Position of this rank's rows among all rows.

    Attributes:
        first: index of this rank's first row among all rows.
        rows: number of this rank's rows; 0 if its weight is 0.
        total: number of rows of all ranks.
        weight: weight of this rank's loss.
    """

    first: int
    rows: int
    total: int
    weight: float


@final
class RowGather:
    """Gathers rows in a separate group, so it can run beside backward's reductions.

    Args:
        group: process group of all ranks, used for nothing else.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._calls = 0

    @disable_dynamo
    def gather(
        self, tensor: torch.Tensor, weight: float, call: str = "elche.all_gather"
    ) -> torch.Tensor:
        """Gathers the rows of all ranks in rank order; a collective call.

        Args:
            tensor: this rank's rows, along its first dimension.
            weight: weight of this rank's loss; with 0 it contributes no rows.
            call: name of the user's call for errors.

        Raises:
            MismatchError: ranks gather different kinds of rows.
            CommunicationError: a rank did not arrive in time.
        """
        self._calls += 1
        what = f"{call}, call {self._calls}"
        apply: Callable[..., torch.Tensor] = _GatherRows.apply
        return apply(tensor, self._group, self._parts(tensor, weight, what), what)

    def _parts(self, tensor: torch.Tensor, weight: float, what: str) -> RowParts:
        group, rows = self._group, tensor.shape[0] if weight else 0
        needs_grad = tensor.requires_grad and torch.is_grad_enabled()
        kind = f"rows {list(tensor.shape[1:])} {tensor.dtype}" + (
            " with gradient" if needs_grad else ""
        )
        table = torch.zeros(group.world_size, 2, dtype=torch.int64, device="cpu")
        mine = (rows, zlib.crc32(kind.encode()))
        table[group.rank] = torch.tensor(mine, device="cpu")
        group.all_reduce(table, what)
        if len(set(table[:, 1].tolist())) > 1:
            kinds = gather_texts(group, kind, what)
            raise MismatchError(f"{what}: ranks pass {kinds}; pass the same kind")
        counts: list[int] = table[:, 0].tolist()
        return RowParts(sum(counts[: group.rank]), rows, sum(counts), weight)


class _GatherRows(torch.autograd.Function):
    """Sums disjoint rows in forward, and weighted gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: Group, parts: RowParts, what: str
    ) -> torch.Tensor:
        """Gathers rows; exact in any dtype, as only one rank's bytes are nonzero."""
        ctx.group, ctx.parts, ctx.what = group, parts, what
        ctx.shape, ctx.dtype = tensor.shape, tensor.dtype
        width = math.prod(tensor.shape[1:]) * tensor.element_size()
        size = parts.total * width
        message = torch.zeros(
            -(-size // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8, device="cpu"
        )
        if parts.rows and size:
            own = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
            start = parts.first * width
            message[start : start + own.numel()] = own
        if size:
            group.all_reduce(message.view(torch.int64), what)
        rows = message[:size].view(tensor.dtype)
        return rows.view(parts.total, *tensor.shape[1:]).to(tensor.device)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Returns the gradient of all ranks' losses with respect to own rows."""
        parts: RowParts = ctx.parts
        grad = grads[0]
        wide = torch.promote_types(grad.dtype, torch.float32)
        if parts.weight:
            message = grad.to("cpu", wide, copy=True).contiguous().mul_(parts.weight)
        else:  # not 0 times a gradient, which may be NaN
            message = torch.zeros(grad.shape, dtype=wide, device="cpu")
        if message.numel():
            ctx.group.all_reduce(message, f"the backward pass of {ctx.what}")
        own = torch.zeros(ctx.shape, dtype=wide, device="cpu")
        if parts.rows:
            own = message[parts.first : parts.first + parts.rows] / parts.weight
        return own.to(grad.device, ctx.dtype), None, None, None
