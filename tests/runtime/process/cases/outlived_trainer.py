"""`elche.launch` of a `Trainer` whose last rank dies: `outlived_trainer.py POLICY`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
import tests.harness.uncompiled  # noqa: F401 - starts faster

SAMPLES = 240
DIES_AT = 5
VICTIM = 2
steps = 0


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """In an early batch of training the last rank dies."""
    global steps
    steps += model.training
    if model.training and elche.rank() == VICTIM and steps == DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    value: torch.Tensor = model(batch[0]).square().mean()
    return value


def fit(policy: str) -> tuple[int, list[int], list[bool]]:
    """What is left of three ranks trains two epochs."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    result = elche.Trainer(
        lambda: nn.Linear(4, 2),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss,
        dataset=TensorDataset(x),
        eval_dataset=TensorDataset(x[:30]),
        batch_size=12,
        epochs=2,
        policy=policy,
        seed=0,
    ).fit()
    return (
        result.report.world_size,
        [record.samples for record in result.history],
        [record.eval_loss is not None for record in result.history],
    )


if __name__ == "__main__":
    print("returned", elche.launch(fit, 3, args=(sys.argv[1],)))
