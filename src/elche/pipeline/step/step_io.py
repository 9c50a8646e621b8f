"""Input and output of one rank's part of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elche.pipeline.stage import LayerCaches


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
