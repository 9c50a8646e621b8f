"""Results of steps and evaluations, and their composition from microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from elche.errors import ConfigError
from elche.pipeline.step.executor import StepResults

OutputRanks: TypeAlias = int | Literal["last", "all"]


@dataclass(frozen=True)
class StepOutput:
    """Result of a step.

    Attributes:
        loss: loss of the whole batch, under the configured reduction; on every rank.
        losses: unweighted loss of each microbatch with samples; on every rank.
        input_gradients: if requested, gradients of the batch's floating-point tensors
            in order, on the rank of the first stage; None for a tensor without effect
            on the loss.
        outputs: detached outputs of the last layer for the whole batch, on the
            requested ranks; None elsewhere.
    """

    loss: float
    losses: torch.Tensor
    input_gradients: tuple[torch.Tensor | None, ...] = ()
    outputs: Any = None


@dataclass(frozen=True)
class EvaluationOutput:
    """Result of an evaluation.

    Attributes:
        loss: loss of the whole batch; None without a target.
        outputs: outputs of the last layer for the whole batch, on the requested ranks;
            None elsewhere. A model's own mapping types become dicts.
    """

    loss: float | None
    outputs: Any


def microbatch_sizes(total: int, labelled: int | None, count: int) -> list[int]:
    """Number of samples of each microbatch; these differ by at most one.

    With fewer samples than `count`, each sample is a microbatch. `labelled` is the
    target's number of samples, if known.
    """
    if total < 1:
        raise ConfigError("the batch has no samples; leave empty batches out")
    count = min(count, total)
    if labelled is not None and labelled != total:
        raise ConfigError(f"the batch has {total} samples, but the target {labelled}")
    each, rest = divmod(total, count)
    return [each + (index < rest) for index in range(count)]


def joined_gradients(results: StepResults) -> tuple[torch.Tensor | None, ...]:
    """Joins the microbatches' input gradients into those of the batch."""
    by_input = zip(*dict(sorted(results.input_gradients.items())).values(), strict=True)
    joined = ([part for part in parts if part is not None] for parts in by_input)
    count = len(results.input_gradients)
    return tuple(torch.cat(each) if len(each) == count else None for each in joined)
