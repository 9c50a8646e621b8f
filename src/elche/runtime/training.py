"""The user's objects to train: model, optimizer, loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from elche.config import RunConfig
from elche.runtime.data.batch_weights import BatchWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the user has given this rank to train.

    Attributes:
        config: the agreed settings.
        model: the model, equal on all ranks.
        optimizer: its optimizer.
        loader: the user's loader.
        weights: what batches weigh in means; None: their samples.
    """

    config: RunConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]
    weights: BatchWeights | None = None
