"""Input and output of one rank's part of a step, and its failures."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elche.comm.transport.messages import Failure
from elche.errors import ElcheError
from elche.pipeline.stage import LayerCaches


class PeerFailedError(ElcheError):
    """Another rank cannot go on with the step; carries its failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"rank {failure.rank} failed: {failure.text}")
        self.failure = failure


@dataclass(frozen=True)
class StepInput:
    """Input of this rank's stages in one step.

    Attributes:
        inputs: per microbatch, on the rank of the first stage.
        targets: per microbatch, on the rank of the last stage.
        keywords: per microbatch, for the layers of this rank.
        weights: per microbatch, what its loss counts in the step's loss, loss scale
            included.
        input_gradients: whether the gradients of the inputs are wanted.
        microbatches: that have samples in this step; None for all of the schedule's.
        timeout_s: deadline of each wait.
        caches: of this rank's layers, in generation; None runs them without.
    """

    inputs: Sequence[Any] = ()
    targets: Sequence[Any] = ()
    keywords: Sequence[Mapping[str, Any]] = ()
    weights: Sequence[float] = ()
    input_gradients: bool = False
    microbatches: int | None = None
    timeout_s: float = 300.0
    caches: LayerCaches | None = None


@dataclass
class StepResults:
    """Results of one rank's part of a step.

    Attributes:
        losses: by microbatch, unweighted; on the rank of the last stage.
        outputs: by microbatch; on the rank of the last stage, in evaluation.
        input_gradients: by microbatch, one per tensor of the input that can have one;
            on the rank of the first stage.
    """

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    input_gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


def failure_of(rank: int, error: BaseException) -> Failure:
    """Message to the others about an error."""
    if isinstance(error, PeerFailedError):
        return error.failure
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return Failure(rank, f"{type(error).__name__}: {error}", "".join(lines))
