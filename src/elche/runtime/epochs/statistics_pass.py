"""Guard against BatchNorm statistics recomputed over the ranks' loader."""

from __future__ import annotations

import gc

from elche.errors import ConfigError
from elche.torch_internals.held import BatchNormBase


def batches_tracked() -> int:
    """Batches tracked by this process's unsynchronised BatchNorm layers."""
    layers = (o for o in gc.get_objects() if issubclass(type(o), BatchNormBase))
    alone = (each for each in layers if not getattr(each, "spans_ranks", False))
    return sum(int(each.num_batches_tracked or 0) for each in alone)


def refuse_statistics(before: int) -> None:
    """Refuses a first batch without gradients that a BatchNorm layer has tracked."""
    if batches_tracked() > before:
        raise ConfigError(
            "a pass over the ranks' loader without gradients writes BatchNorm "
            "statistics, of this rank's share only: give update_bn the plain "
            "DataLoader, on every rank; before an evaluation call model.eval()"
        )
