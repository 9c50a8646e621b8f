"""BatchNorm over the union batch of all ranks, weighted by samples, on any transport.

Forward: every rank sends count, mean and sum of squared deviations per channel. It
combines those of all ranks in rank order, in double precision on the host, so all ranks
get the same bits (Chan, Golub and LeVeque, 1979: stable where a sum of squares
cancels).

Backward: the two sums that couple the samples of a batch are reduced, weighted by each
rank's loss weight in the mean over the union batch. torch's own layer
(``torch.nn.SyncBatchNorm``) has no CPU path, sums gradients as if all shares were equal
and updates its statistics twice under activation checkpointing.

A layer belongs to a :class:`NormScope`, which holds the group and the current batch's
weight. All layers of one model share one scope. A layer without a group, or in a group
of one rank, is plain BatchNorm.

Ranks without samples: an empty batch (``x[:0]``) and a batch of weight 0 take part, add
nothing, and delay no rank, forward or backward. If a rank does not call the layer at
all, the others wait until the group's deadline, and the error names the layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin

from elche.comm.norm.norm_scope import NormScope
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError, ProtocolError
from elche.torch_internals.held import BatchNormBase, disable_dynamo, held_modules
from elche.torch_internals.passes import graph_task_id

Layers = TypeVar("Layers", bound=nn.Module)

HEAD = 2
"""Numbers before a rank's mean in its part of a message: count and layer digest."""


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
    """Sums over ranks, each weighted by its loss, over this rank's loss weight."""
    own = statistics.own
    message = torch.zeros(sums.numel(), dtype=torch.float64, device="cpu")
    if own:
        message.copy_(sums).mul_(own)
    what = f"the backward pass of SyncBatchNorm {statistics.name!r}"
    total = statistics.scope.sum(message, what)
    return (total / own if own else total).to(sums.device, sums.dtype)


def _per_channel(input: torch.Tensor) -> list[int]:
    return [1, -1, *(1 for _ in range(input.dim() - 2))]


@final
class SyncBatchNorm(BatchNormBase):
    """BatchNorm1d, 2d and 3d over the batches of all ranks together.

    In training mode the statistics are those of the union batch; input is at least
    two-dimensional, channels in dimension 1. In evaluation mode, and on one rank, it is
    torch's BatchNorm. Every rank must call the layers equally often in the same order.
    A forward pass inside a backward pass is a recomputation (activation checkpointing):
    it normalises identically and keeps the running statistics. Gradients of gradients
    are not supported. Arguments are those of torch's BatchNorm.

    Attributes:
        scope: ranks that normalise together, and the weight of the current batch; this
            rank alone until :func:`bind_sync_batchnorm`.
    """

    scope: NormScope = NormScope()
    _name, _number = "", 0.0

    @classmethod
    def converted(cls, layer: BatchNormBase, name: str) -> SyncBatchNorm:
        """Makes a layer that has a BatchNorm layer's tensors, hooks and modes."""
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        made._attach(cls.scope, name)
        return made

    @property
    def spans_ranks(self) -> bool:
        """True if other ranks take part in training mode."""
        return self.scope.group.world_size > 1

    def _attach(self, scope: NormScope, name: str) -> None:
        self.scope = scope
        self._name = name
        self._number = float(zlib.crc32(name.encode()) >> 8)  # exact in float32

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ConfigError(
                f"SyncBatchNorm {self._name!r} expected at least 2 dimensions, got "
                f"{input.dim()}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises the input; returns the same shape and dtype.

        Raises:
            ConfigError: the input has fewer than two dimensions, or the union batch has
                only one value per channel, or the call is inside `elche.evaluate`.
            CommunicationError: a rank did not arrive in time.
            ProtocolError: ranks are in different layers.
        """
        if not self.training:
            return super().forward(input)
        return self._normalised(input)

    @disable_dynamo  # torch.compiler.disable would import all of dynamo here
    def _normalised(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises in training mode, outside of compiled graphs."""
        is_again = graph_task_id() != -1
        if not self.spans_ranks:
            return self._normalised_again(input) if is_again else super().forward(input)
        if self.scope.divided_by:
            raise ConfigError(
                f"SyncBatchNorm {self._name!r} is in training mode inside "
                f"{self.scope.divided_by}, where ranks run different batches without "
                "collectives; call model.eval() before"
            )
        self._check_input_dim(input)
        statistics = self._union(input.detach())
        if not is_again:
            self._track(statistics)
        apply: Callable[..., torch.Tensor] = Normalise.apply
        return apply(input, self.weight, self.bias, statistics)

    def _normalised_again(self, input: torch.Tensor) -> torch.Tensor:
        """Recomputes on one rank, on copies of the running statistics.

        Writing to the originals would raise their versions, which autograd checks.
        """
        mean, var = (
            None if statistic is None else statistic.clone()
            for statistic in (self.running_mean, self.running_var)
        )
        return F.batch_norm(
            input, mean, var, self.weight, self.bias, True, 0.0, self.eps
        )

    @torch.no_grad()
    def _union(self, input: torch.Tensor) -> UnionStatistics:
        """Computes the statistics of the union batch; a collective call."""
        scope, channels = self.scope, input.shape[1]
        weighs = scope.loss_weight != 0.0
        count = float(input.numel() // channels) if channels and weighs else 0.0
        size = HEAD + 2 * channels
        ranks = scope.group.world_size
        parts = torch.zeros(ranks, size, dtype=torch.float64, device="cpu")
        own = parts[scope.group.rank]
        own[:HEAD] = torch.tensor(
            [count, self._number], dtype=torch.float64, device="cpu"
        )
        kind = torch.promote_types(input.dtype, torch.float32)  # half in single
        if count:
            dims = [dim for dim in range(input.dim()) if dim != 1]
            var, mean = torch.var_mean(input.to(kind), dims, correction=0)
            own[HEAD:] = torch.cat([mean, var * count]).to("cpu", torch.float64)
        what = f"the statistics of SyncBatchNorm {self._name!r}"
        parts = scope.sum(parts.view(-1), what).view(ranks, size)
        self._refuse_other_layers(parts[:, 1].tolist())
        mean, var, total = _combined(parts)
        if total == 1:
            raise ConfigError(
                f"SyncBatchNorm {self._name!r} expected more than one value per "
                "channel in the batches of all ranks together, got one"
            )
        return UnionStatistics(
            mean.to(input.device, kind),
            var.to(input.device, kind),
            total,
            count if scope.loss_weight is None else scope.loss_weight,
            scope,
            self.eps,
            self._name,
        )

    def _refuse_other_layers(self, numbers: list[float]) -> None:
        for rank, number in enumerate(numbers):
            if number != self._number:
                raise ProtocolError(
                    f"rank {rank} is in another layer than SyncBatchNorm "
                    f"{self._name!r}: call the same layers in the same order on every "
                    "rank"
                )

    @torch.no_grad()
    def _track(self, statistics: UnionStatistics) -> None:
        """Updates the running statistics as torch does on the union batch."""
        mean, var = self.running_mean, self.running_var
        if not self.track_running_stats or mean is None or var is None:
            return
        if not statistics.count:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        unbiased = statistics.var * (statistics.count / (statistics.count - 1.0))
        factor = 0.0 if factor is None else factor
        mean.mul_(1.0 - factor).add_(statistics.mean.to(mean.dtype), alpha=factor)
        var.mul_(1.0 - factor).add_(unbiased.to(var.dtype), alpha=factor)


def _combined(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Combines all parts to mean, biased variance and count."""
    channels = (parts.shape[1] - HEAD) // 2
    counts = parts[:, :1]
    means, squares = parts[:, HEAD : HEAD + channels], parts[:, HEAD + channels :]
    total = float(counts.sum())
    mean = (counts * means).sum(0) / max(1.0, total)
    var = (squares + counts * (means - mean).square()).sum(0) / max(1.0, total)
    return mean, var, total


def convert_sync_batchnorm(module: Layers) -> Layers:
    """Makes every BatchNorm layer of ``module`` a :class:`SyncBatchNorm`, in place.

    As in torch's converter, parameters, buffers, modes, hooks and names stay. A layer
    used in two places stays shared. The ranks of the run normalise together, once
    `elche.setup`, `elche.Replica` or `elche.DistributedDataParallel` has the model;
    until then, and on one device, the layers are plain BatchNorm.

    Args:
        module: model, or a part of it.

    Returns:
        The same module, or a new layer if the module itself is a BatchNorm layer.

    Raises:
        ConfigError: a lazy layer has not seen its first batch.
    """
    made: dict[int, SyncBatchNorm] = {}

    def replacement(layer: BatchNormBase, name: str) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ConfigError(
                f"{name or 'the module'} is lazy and does not know its channels yet; "
                "run one batch through it before it is converted"
            )
        if id(layer) not in made:
            made[id(layer)] = SyncBatchNorm.converted(layer, name)
        return made[id(layer)]

    if isinstance(module, BatchNormBase):
        return cast(Layers, replacement(module, ""))
    for path, parent in list(module.named_modules()):
        for name, child in list(held_modules(parent).items()):
            if isinstance(child, BatchNormBase):
                full = f"{path}.{name}" if path else name
                held_modules(parent)[name] = replacement(child, full)
    return module


def sync_batchnorm_layers(model: nn.Module) -> dict[str, SyncBatchNorm]:
    """Returns the model's SyncBatchNorm layers by name, each once."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SyncBatchNorm)
    }


def bind_sync_batchnorm(model: nn.Module, group: Group | None) -> NormScope | None:
    """Gives the model's SyncBatchNorm layers a group and one common scope.

    Args:
        model: model with the layers.
        group: group of the ranks that normalise together. Reductions concurrent with
            the backward pass must not use the same gloo group, whose collectives have
            one order. None: no group, as at the end of a run.

    Returns:
        The scope, or None if there are no such layers.
    """
    layers = sync_batchnorm_layers(model)
    if not layers:
        return None
    scope = NormScope(group)
    for name, layer in layers.items():
        layer._attach(scope, name)
    return scope
