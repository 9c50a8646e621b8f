"""SyncBatchNorm layers of a wrapped model.

Their collectives run inside forward and backward, beside reductions of gradients that
are under way, so they have a process group of their own with the same ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from elche.comm.norm.norm_scope import NormScope
from elche.comm.norm.sync_batch_norm import (
    SyncBatchNorm,
    bind_sync_batchnorm,
    sync_batchnorm_layers,
)
from elche.ddp.group import TorchGroup
from elche.errors import ConfigError
from elche.torch_internals.held import BatchNormBase, held_modules


def bind_norms(model: nn.Module, group: TorchGroup) -> NormScope | None:
    """Gives the model's layers a group, with all ranks; None if it has no such.

    Layers that were converted for a group of their own keep it.
    """
    layers = sync_batchnorm_layers(model).values()
    if group.world_size == 1 or all(layer.has_own_scope for layer in layers):
        return None
    return bind_sync_batchnorm(model, group.sibling())


def plain_norms(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Holders of the model's plain BatchNorm layers, and their keys."""
    return [
        (held, key)
        for module in model.modules()
        for held in [held_modules(module)]
        for key, layer in held.items()
        if isinstance(layer, BatchNormBase) and not isinstance(layer, SyncBatchNorm)
    ]


def refuse_converted(places: list[tuple[dict[str, Any], str]]) -> None:
    """Refuses SyncBatchNorm layers made after wrapping, which have no group.

    Raises:
        ConfigError: there is one.
    """
    for held, key in places:
        layer = held.get(key)
        if isinstance(layer, SyncBatchNorm) and not layer.has_own_scope:
            raise ConfigError(
                f"BatchNorm layer {key!r} was converted after the model was wrapped, "
                "and does not take part in the group; convert before wrapping"
            )
