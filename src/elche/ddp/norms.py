"""SyncBatchNorm layers of a wrapped model: where they meet, and what a batch weighs.

Their collectives run inside forward and backward, beside reductions of gradients that
are under way, so they have a group of their own: with torch's, another one of the same
ranks. A group of elche's own has no sibling here; it serves for both where buckets go
after the backward pass.
"""

from __future__ import annotations

from typing import Any, final

from torch import nn

from elche.comm.norm.norm_scope import NormScope
from elche.comm.norm.sync_batch_norm import (
    SyncBatchNorm,
    bind_sync_batchnorm,
    sync_batchnorm_layers,
)
from elche.comm.transport.process_group import Group
from elche.ddp.group import TorchGroup
from elche.ddp.options import DdpOptions
from elche.errors import ConfigError
from elche.torch_internals.held import BatchNormBase, held_modules


def plain_norms(model: nn.Module, group: Group) -> list[tuple[dict[str, Any], str]]:
    """What holds the model's plain BatchNorm layers, and under what key."""
    return [
        (held, key)
        for module in model.modules()
        for held in [held_modules(module)]
        for key, layer in held.items()
        if isinstance(layer, BatchNormBase) and group.world_size > 1
        if not isinstance(layer, SyncBatchNorm)
    ]


def refuse_converted(places: list[tuple[dict[str, Any], str]]) -> None:
    """Refuses SyncBatchNorm layers made after wrapping, which would meet nobody.

    Raises:
        ConfigError: there is one.
    """
    for held, key in places:
        layer = held.get(key)
        if isinstance(layer, SyncBatchNorm) and not layer.has_own_scope:
            raise ConfigError(
                f"BatchNorm layer {key!r} was converted after the model was wrapped, "
                "and does not take part in the group; convert before wrapping, or call "
                "set_group() on every rank"
            )


@final
class WrappedNorms:
    """The layers that normalise over the group of a wrapper; made by :meth:`bind`.

    Args:
        model: the wrapped model.
        scope: of its layers.
        sibling: the group formed for them alone, or None.
        is_mean: a rank's loss is a mean over its batch.
    """

    def __init__(
        self,
        model: nn.Module,
        scope: NormScope,
        sibling: TorchGroup | None,
        *,
        is_mean: bool,
    ) -> None:
        self._model = model
        self._scope = scope
        self._sibling = sibling
        self._is_mean = is_mean

    @staticmethod
    def bind(
        model: nn.Module, group: Group, options: DdpOptions
    ) -> WrappedNorms | None:
        """Gives the model's layers a group, with all ranks; None if it has no such.

        Layers that were converted for a group of their own keep it.

        Raises:
            ConfigError: the group cannot serve both layers and buckets.
        """
        layers = sync_batchnorm_layers(model).values()
        own = [layer for layer in layers if not layer.has_own_scope]
        if not own or options.strategy == "none" or group.world_size == 1:
            return None
        sibling, meeting = None, group
        if isinstance(group, TorchGroup):
            meeting = sibling = group.sibling()
        elif options.strategy != "synchronous":
            raise ConfigError(
                "SyncBatchNorm layers would meet in the same group as the gradients "
                "that are reduced beside them; pass a torch process group, "
                "strategy='synchronous', or a second group to convert_sync_batchnorm"
            )
        scope = bind_sync_batchnorm(model, meeting)
        assert scope is not None
        is_mean = options.loss_reduction == "mean"
        return WrappedNorms(model, scope, sibling, is_mean=is_mean)

    def weigh(self, weight: float | None) -> None:
        """Says what this rank's next batch weighs in the reduction of its gradients.

        Args:
            weight: its samples, or what was set; None outside of training steps.
        """
        if weight is None or self._is_mean:
            self._scope.weigh(weight)
        else:
            self._scope.weigh(float(weight > 0))

    def release(self) -> None:
        """Makes the layers plain BatchNorm, and leaves their group."""
        bind_sync_batchnorm(self._model, None)
        if self._sibling is not None:
            self._sibling.end()
