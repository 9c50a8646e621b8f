"""Results of steps and evaluations, and their composition from microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from elche.errors import ConfigError
from elche.pipeline.step.step_io import StepResults


@dataclass(frozen=True)
class StepOutput:
    """What a step gives.

    Attributes:
        loss: of the whole batch, under the configured reduction; on every rank.
        losses: of each microbatch, unweighted [micro_batches]; on every rank.
        input_gradients: of the batch's floating point tensors in order, where asked
            for, on the rank of the first stage; None for one that no loss depends on.
    """

    loss: float
    losses: torch.Tensor
    input_gradients: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True)
class EvaluationOutput:
    """What an evaluation gives.

    Attributes:
        loss: of the whole batch; None without a target.
        outputs: of the last layer for the whole batch, on the last stage's rank.
    """

    loss: float | None
    outputs: Any


def microbatch_sizes(total: int, labelled: int | None, count: int) -> list[int]:
    """Samples of each microbatch; they differ by one at most.

    Args:
        total: samples of the batch.
        labelled: samples of the target, if it can be told.
        count: microbatches.

    Raises:
        ConfigError: there are too few, or batch and target differ.
    """
    if total < count:
        raise ConfigError(
            f"a batch of {total} samples cannot be cut into {count} microbatches; "
            "give larger batches or fewer micro_batches"
        )
    if labelled is not None and labelled != total:
        raise ConfigError(f"the batch has {total} samples, but the target {labelled}")
    each, rest = divmod(total, count)
    return [each + (index < rest) for index in range(count)]


def loss_weights(sizes: list[int], scale: float, reduction: str) -> list[float]:
    """What each microbatch's loss counts in the batch's, times a loss scale."""
    if reduction == "sum":
        return [scale] * len(sizes)
    return [scale * size / sum(sizes) for size in sizes]


def joined_gradients(results: StepResults) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the batch's tensors from those of the microbatches'."""
    by_input = zip(
        *(results.input_gradients[i] for i in sorted(results.input_gradients)),
        strict=True,
    )
    joined: list[torch.Tensor | None] = []
    for parts in by_input:
        there = [part for part in parts if part is not None]
        joined.append(torch.cat(there) if len(there) == len(parts) else None)
    return tuple(joined)
