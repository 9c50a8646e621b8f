"""Weights of microbatches in means over something else than samples, such as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elche.errors import ConfigError
from elche.pipeline.cutting.own_loss import IGNORED, OwnLoss
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.step.batch_dimensions import BatchDimensions
from elche.pipeline.step.outputs import microbatch_sizes
from elche.pipeline.trees import batch_samples
from elche.runtime.data.batch_weights import BatchWeights
from elche.torch_internals.batches import tree_leaves

_CUT = ("batch", "target")


def read_weights(
    parts: Parts, dimensions: BatchDimensions, given: Mapping[str, Any]
) -> tuple[list[float] | None, dict[str, list[float]]]:
    """Weights of this rank's microbatches, and their ignored targets per sample.

    Args:
        parts: this rank's stages and plan.
        dimensions: cuts the values.
        given: the batch, on the rank of the first stage, the target, on that of the
            last one, and keywords, each by its role.

    Returns:
        The weights; None for numbers of samples, and where another rank weighs. Ignored
        targets per sample in batch and target, where samples are weights.

    Raises:
        ConfigError: `weight_of` failed, or there are no samples to cut.
    """
    config, loss_fn = parts.given.config, parts.given.loss_fn
    if config.loss_reduction == "sum":
        return None, {}
    most = parts.plan.schedule.num_microbatches
    sizes = {
        role: microbatch_sizes(samples, None, most)
        for role in _CUT
        if (samples := batch_samples(given[role]))
    }
    cut = {
        role: dimensions.split(given[role], role, mine) for role, mine in sizes.items()
    }
    role = "batch" if isinstance(loss_fn, OwnLoss) else "target"
    if config.weight_of is None and not isinstance(loss_fn, OwnLoss):
        return None, {
            role: [_ignored(x) / size for x, size in zip(cut[role], mine, strict=True)]
            for role, mine in sizes.items()
        }
    if role not in cut:
        if given[role] is None:
            return None, {}
        raise ConfigError(
            f"weight_of= needs samples along the first dimension of the {role}, got "
            f"{type(given[role]).__name__}"
        )
    if config.weight_of is not None:
        weights = BatchWeights(config.weight_of, parts.rank)
        found = enumerate(cut[role])
        return [
            weights.of(one, f"the {role} of microbatch {i}") for i, one in found
        ], {}
    assert isinstance(loss_fn, OwnLoss)
    words = dimensions.split(given["keywords"], "keywords", sizes[role])
    counts = [loss_fn.count(*one) for one in zip(cut[role], words, strict=True)]
    return ([n for n in counts if n is not None] or None), {}


def _ignored(value: Any) -> int:
    return sum(
        int((one == IGNORED).sum())
        for one in tree_leaves(value)
        if isinstance(one, torch.Tensor) and one.dtype == torch.int64 and one.dim()
    )


def differ_in_ignored(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> bool:
    """True if microbatches have different numbers of ignored targets per sample.

    Args:
        by_rank: what `read_weights` returned on each rank.
    """
    return any(
        len({share for mine in by_rank for share in mine.get(role, ())}) > 1
        for role in _CUT
    )
