"""Guard against BatchNorm statistics that are taken anew over the ranks' loader."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from torch import nn

from elche.comm.norm.sync_batch_norm import SyncBatchNorm
from elche.errors import ConfigError
from elche.torch_internals.held import BatchNormBase


def batch_norm_counts() -> dict[nn.Module, int]:
    """Batches that each BatchNorm layer of this process has tracked.

    Asked for in the first batch of a pass without gradients; the layers may be those of
    a copy that elche has not seen.
    """
    layers = [
        each for each in gc.get_objects() if issubclass(type(each), BatchNormBase)
    ]
    return {
        each: int(each.num_batches_tracked)
        for each in layers
        if type(each) is not SyncBatchNorm and each.num_batches_tracked is not None
    }


def refuse_statistics(before: Mapping[nn.Module, int]) -> None:
    """Refuses a pass that has written statistics since.

    Raises:
        ConfigError: it has.
    """
    if batch_norm_counts() != before:
        raise ConfigError(
            "a pass over the ranks' loader without gradients writes BatchNorm "
            "statistics (update_bn, or a model in training mode), and this rank has "
            "its share of the batches only: give update_bn the plain DataLoader, on "
            "every rank; for an evaluation call model.eval() before"
        )
