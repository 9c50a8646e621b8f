"""The layers of a rank while tokens are generated with caches of keys and values."""

from __future__ import annotations

from typing import final

import torch

from elche.errors import ConfigError
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.stage import CACHE, Layer, Stage
from elche.pipeline.step.executor import Executor

NO_CACHE = "no layer takes cache="


@final
class CachedLayers:
    """This rank's layers that take `cache=`, of the plan that runs now.

    Args:
        parts: of this rank.

    Attributes:
        proven: kinds of input for which caches have given the logits of whole runs.
        refused: why the pipeline does without caches, the same on all ranks; "" while
            it does not.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._offer: tuple[bool, str] | None = None
        self.executor = parts.executor
        self.proven: set[str] = set()
        self.refused = ""

    def offer(self) -> tuple[bool, str]:
        """True if a layer of this rank takes a cache, and why that is not known.

        Makes the layers anew that were cut of a model: that may take seconds.
        """
        if self._offer is None:
            try:
                self.executor, takes = _cached(self._parts)
                self._offer = takes, ""
            except Exception as error:  # without a cache it is slow, not wrong
                self._offer = False, f"{type(error).__name__}: {error}"
        return self._offer


def _cached(parts: Parts) -> tuple[Executor, bool]:
    """Executor of layers with caches, and True if there are any."""
    layers = parts.given.layers
    stages = {index: one.stage for index, one in parts.stages.items()}
    executor = parts.executor
    if layers.cut_cached is not None:
        made = layers.cut_cached()
        if len(made) != len(layers):
            raise ConfigError(
                f"the model has {len(layers)} layers, and {len(made)} with a cache"
            )
        for index in stages:
            mine = parts.plan.layers_of(index)
            own = [
                Layer(layers.names[at], made[at].to(parts.given.device)) for at in mine
            ]
            stages[index] = Stage(index, own, layers.unpacks, None, mine.start)
        executor = executor.with_stages(
            {index: StageBackward(one, None, False) for index, one in stages.items()}
        )
    return executor, any(CACHE in one.keywords for one in stages.values())


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Distance of logits, relative to the second ones.

    A token that may not be chosen has one of -inf in both.
    """
    found, wanted = found.double().cpu(), wanted.double().cpu()
    is_ruled_out = torch.isneginf(found) & torch.isneginf(wanted)
    found, wanted = (one.masked_fill(is_ruled_out, 0.0) for one in (found, wanted))
    apart = (found - wanted).norm() / wanted.norm().clamp_min(1e-300)
    return float(apart)


def tolerance(dtype: torch.dtype) -> float:
    """Relative distance of logits of this dtype by rounding alone."""
    return float(torch.finfo(dtype).eps ** 0.4)
