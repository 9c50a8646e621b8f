"""Guard against BatchNorm statistics that are taken anew over the ranks' loader."""

from __future__ import annotations

import gc

from torch import nn

from elche.comm.norm.sync_batch_norm import SyncBatchNorm
from elche.errors import ConfigError
from elche.torch_internals.held import BatchNormBase


def batch_norm_counts() -> dict[nn.Module, int]:
    """Batches that each BatchNorm layer of this process has tracked, of any model."""
    layers = (o for o in gc.get_objects() if issubclass(type(o), BatchNormBase))
    return {
        each: int(each.num_batches_tracked)
        for each in layers
        if not (isinstance(each, SyncBatchNorm) and each.spans_ranks)
        if each.num_batches_tracked is not None
    }


def refuse_statistics(before: dict[nn.Module, int]) -> None:
    """Refuses a first batch without gradients that has changed these counts.

    Raises:
        ConfigError: it has.
    """
    if batch_norm_counts() != before:
        raise ConfigError(
            "a pass over the ranks' loader without gradients writes BatchNorm "
            "statistics (update_bn, or a model in training mode), of this rank's share "
            "only: give update_bn the plain DataLoader, on every rank; for an "
            "evaluation call model.eval() before"
        )
