"""BatchNorm with given statistics, and the backward pass that couples the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from elche.comm.norm.norm_scope import NormScope


@dataclass(frozen=True, slots=True)
class UnionStatistics:
    """Mean and variance of the union batch.

    Attributes:
        mean: mean per channel, in the precision of the arithmetic.
        var: biased variance per channel.
        count: number of elements per channel.
        own: weight of this rank's gradients.
        scope: scope of the layer.
        eps: epsilon of the layer.
        name: name of the layer.
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: float
    own: float
    scope: NormScope
    eps: float
    name: str


class Normalise(torch.autograd.Function):
    """Element-wise normalisation, whose backward reduces over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: UnionStatistics,
    ) -> torch.Tensor:
        """Normalises with the union batch's statistics."""
        inv_std = torch.rsqrt(statistics.var + statistics.eps)
        ctx.save_for_backward(input, weight, statistics.mean, inv_std)
        ctx.statistics = statistics
        if not input.numel():
            return torch.empty_like(input)
        kinds = {t.dtype for t in (input, weight, bias) if t is not None}
        mean, var, eps = statistics.mean, statistics.var, statistics.eps
        if kinds == {mean.dtype}:
            return F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)
        shape = _per_channel(input)
        scale = inv_std if weight is None else inv_std * weight
        out = (input - statistics.mean.view(shape)) * scale.view(shape)
        if bias is not None:
            out += bias.view(shape)
        return out.to(input.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Returns gradients of this rank's loss, coupled through the union batch."""
        input, weight, mean, inv_std = ctx.saved_tensors
        statistics: UnionStatistics = ctx.statistics
        shape, dims = _per_channel(input), [d for d in range(input.dim()) if d != 1]
        grad = grads[0].to(mean.dtype)
        centred = input - mean.view(shape)
        sum_dy = grad.sum(dims)
        sum_dy_xmu = (grad * centred).sum(dims)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_dy, sum_dy_xmu])
            sums = _summed(statistics, sums)
            if statistics.own:
                scale = inv_std if weight is None else inv_std * weight
                shift, slope = (sums / statistics.count).chunk(2)
                of_input = grad - shift.view(shape)
                of_input -= centred * (slope * inv_std.square()).view(shape)
                of_input *= scale.view(shape)
                of_input = of_input.to(input.dtype)
            else:
                of_input = torch.zeros_like(input)
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = (sum_dy_xmu * inv_std).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = sum_dy.to(mean.dtype if weight is None else weight.dtype)
        return of_input, of_weight, of_bias, None


def _summed(statistics: UnionStatistics, sums: torch.Tensor) -> torch.Tensor:
    """Sums over all ranks, scaled to this rank's own loss."""
    own = statistics.own
    message = torch.zeros(sums.numel(), dtype=torch.float64, device="cpu")
    if own:
        message.copy_(sums).mul_(own)
    what = f"the backward pass of SyncBatchNorm {statistics.name!r}"
    total = statistics.scope.sum(message, what)
    return (total / own if own else total).to(sums.device, sums.dtype)


def _per_channel(input: torch.Tensor) -> list[int]:
    return [1, -1, *(1 for _ in range(input.dim() - 2))]
