"""A script that trains until it is told to stop, and says how it ended."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche

batches = 0


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global batches
    batches += 1
    if batches == 20:
        print("20 batches", flush=True)
    return (out - target).square().mean()


x = torch.randn(400, 1)
result = elche.Trainer(
    lambda: nn.Linear(1, 1),
    lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    loss,
    dataset=TensorDataset(x, 2 * x),
    batch_size=4,
    epochs=1_000_000,
    policy=sys.argv[1],
    checkpoint_dir=sys.argv[2] if sys.argv[2:] else None,
).fit()
model = [value.item() for value in result.model_state.values()]
print(f"ended by {result.stopped_by}: {result.report.samples} {model}", flush=True)
