"""What a script of the corpus leaves for the comparison: not counted as its lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn


def save(
    model: nn.Module, lr: float, samples: int, score: float | torch.Tensor = 0.0
) -> None:
    """Saves this process' result as RANK.pt in the folder that argv names.

    Args:
        model: the model, trained.
        lr: learning rate at the end.
        samples: samples that the loop of this process has seen.
        score: held-out loss, for scripts that draw at random.
    """
    result = {
        "state": {name: each.cpu() for name, each in model.state_dict().items()},
        "lr": lr,
        "samples": samples,
        "score": float(score),
    }
    torch.save(result, Path(sys.argv[1]) / f"{os.environ.get('RANK', '0')}.pt")
