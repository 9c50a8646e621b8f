"""BatchNorm over the union batch of all ranks, weighted by samples, on any transport.

Forward: every rank sends its count, mean and sum of squared deviations per channel, and
combines what all sent in the order of ranks (Chan, Golub and LeVeque, 1979: stable
where a sum of squares cancels), in double precision on the host: all ranks get the same
bits.
Backward: the two sums that couple the samples of a batch are reduced, each rank's share
of them weighted as its loss weighs in the mean over the union batch. torch's own layer
(``torch.nn.SyncBatchNorm``) has no CPU path, sums gradients as if all shares were equal
and updates its statistics twice under activation checkpointing.

A layer belongs to a :class:`NormScope`, which holds the group, and what the batch in
hand weighs. All layers of one model share one. A layer of no group, or of a group of
one, is plain BatchNorm.

What is promised about ranks without samples: a batch that is empty (``x[:0]``) and one
of weight 0 take part, add nothing, and delay no rank, forward or backward. A
rank that does not call the layer at all cannot take part: the others wait for it until
the group's deadline, and the error names the layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar, cast, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from elche.comm.norm.norm_function import Normalise, UnionStatistics
from elche.comm.norm.norm_scope import NormScope
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError, ProtocolError
from elche.torch_internals.held import BatchNormBase, disable_dynamo, held_modules
from elche.torch_internals.passes import graph_task_id

Layers = TypeVar("Layers", bound=nn.Module)

HEAD = 2
"""Numbers before a rank's mean in its part of a message: count, and which layer."""


@final
class SyncBatchNorm(BatchNormBase):
    """BatchNorm1d, 2d and 3d over the batches of all ranks together.

    In training mode the statistics are those of the union batch; input is at least
    two-dimensional, channels in dimension 1. In evaluation mode, and on one rank, it is
    torch's BatchNorm. Every rank calls the layer equally often and in the same order.
    A forward pass inside a backward pass is a recomputation (activation checkpointing):
    it normalises alike and leaves the running statistics alone. Gradients of gradients
    are not supported.

    Args:
        num_features: channels.
        eps: added to the variance.
        momentum: of the running statistics; None for their plain mean.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        scope: who normalises together; see :func:`bind_sync_batchnorm`.

    Attributes:
        scope: ranks that normalise together, and the weight of the current batch.
        has_own_scope: it was made for a group of its own, which nothing replaces.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        scope: NormScope | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device=device,
            dtype=dtype,
        )
        self._attach(scope or NormScope(), "", is_own=scope is not None)

    @classmethod
    def converted(
        cls, layer: BatchNormBase, scope: NormScope, name: str
    ) -> SyncBatchNorm:
        """A layer with everything of a BatchNorm layer: tensors, hooks, modes."""
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        made._attach(scope, name, is_own=scope.group.world_size > 1)
        return made

    @property
    def spans_ranks(self) -> bool:
        """True if other ranks take part in training mode."""
        return self.scope.group.world_size > 1

    def _attach(self, scope: NormScope, name: str, *, is_own: bool) -> None:
        self.scope = scope
        self.has_own_scope = is_own
        self._name = name
        self._number = float(zlib.crc32(name.encode()))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ConfigError(
                f"SyncBatchNorm {self._name!r} expected at least 2 dimensions, got "
                f"{input.dim()}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises; the same shape and dtype as ``input``.

        Raises:
            ConfigError: the input has fewer than two dimensions, or the union batch
                one value per channel only, or this is the inside of `elche.evaluate`.
            CommunicationError: not all ranks came in time.
            ProtocolError: ranks are in different layers.
        """
        if not self.training:
            return super().forward(input)
        return self._normalised(input)

    @disable_dynamo  # torch.compiler.disable would import all of dynamo here
    def _normalised(self, input: torch.Tensor) -> torch.Tensor:
        """In training mode; a compiled graph ends before other ranks are met."""
        is_again = graph_task_id() != -1
        if not self.spans_ranks:
            return self._normalised_again(input) if is_again else super().forward(input)
        if self.scope.divided_by:
            raise ConfigError(
                f"SyncBatchNorm {self._name!r} is in training mode inside "
                f"{self.scope.divided_by}, where ranks have different batches and "
                "never meet in it; call model.eval() before"
            )
        self._check_input_dim(input)
        statistics = self._union(input.detach())
        if not is_again:
            self._track(statistics)
        apply: Callable[..., torch.Tensor] = Normalise.apply
        return apply(input, self.weight, self.bias, statistics)

    def _normalised_again(self, input: torch.Tensor) -> torch.Tensor:
        """Alone, on copies of the running statistics: autograd counts what it saves."""
        mean, var = (
            None if statistic is None else statistic.clone()
            for statistic in (self.running_mean, self.running_var)
        )
        return F.batch_norm(
            input, mean, var, self.weight, self.bias, True, 0.0, self.eps
        )

    @torch.no_grad()
    def _union(self, input: torch.Tensor) -> UnionStatistics:
        """Statistics of the union batch, the same on every rank."""
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
    """Mean, biased variance and count of all parts together."""
    channels = (parts.shape[1] - HEAD) // 2
    counts = parts[:, :1]
    means, squares = parts[:, HEAD : HEAD + channels], parts[:, HEAD + channels :]
    total = float(counts.sum())
    mean = (counts * means).sum(0) / max(1.0, total)
    var = (squares + counts * (means - mean).square()).sum(0) / max(1.0, total)
    return mean, var, total


def convert_sync_batchnorm(module: Layers, group: Group | None = None) -> Layers:
    """Makes every BatchNorm layer of ``module`` a :class:`SyncBatchNorm`, in place.

    As torch's converter: parameters, buffers, modes, hooks and names stay; a module
    that is itself a BatchNorm layer is returned as a new layer. A layer that is used at
    two places stays one.

    Args:
        module: the model, or a part of it.
        group: who normalises together. None: the ranks of the run, once `elche.setup`,
            `elche.Replica` or `elche.DistributedDataParallel` has taken the model;
            until then, and on one device, the layers are plain BatchNorm.

    Returns:
        The module; another one only if it is itself a BatchNorm layer.

    Raises:
        ConfigError: a lazy layer has not seen its first batch.
    """
    scope = NormScope(group)
    made: dict[int, SyncBatchNorm] = {}

    def replacement(layer: BatchNormBase, name: str) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ConfigError(
                f"{name or 'the module'} is lazy and does not know its channels yet; "
                "run one batch through it before it is converted"
            )
        if id(layer) not in made:
            made[id(layer)] = SyncBatchNorm.converted(layer, scope, name)
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
    """The model's SyncBatchNorm layers by name, each once."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SyncBatchNorm)
    }


def bind_sync_batchnorm(model: nn.Module, group: Group | None) -> NormScope | None:
    """Gives the model's SyncBatchNorm layers a group, and one scope together.

    Layers that were converted for a group of their own keep it.

    Args:
        model: the model.
        group: who normalises together; its collectives are ordered for themselves, so
            no reduction that runs beside the backward pass may use it over gloo. None:
            nobody, as at the end of a run.

    Returns:
        The scope, None if there are no such layers.
    """
    layers = {
        name: layer
        for name, layer in sync_batchnorm_layers(model).items()
        if not layer.has_own_scope
    }
    if not layers:
        return None
    scope = NormScope(group)
    for name, layer in layers.items():
        layer._attach(scope, name, is_own=False)
    return scope
