"""Trains on and prints each tenth step: `endless.py POLICY`."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled  # noqa: F401 - starts faster

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = TensorDataset(torch.randn(100_000, 4))
model, optimizer, loader = elche.setup(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    DataLoader(data, batch_size=6),
    policy=sys.argv[1],
    timeout_s=60.0,
)
for number, (x,) in enumerate(loader):
    if number % 10 == 0:
        print(f"step {number} at {time.monotonic():.3f}", flush=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)  # a step as long as one that computes
