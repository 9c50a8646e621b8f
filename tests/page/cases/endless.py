"""Trains until it is ended; writes each rank's process id beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import elche

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(2000, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model, optimizer, loader = elche.setup(model, optimizer, loader)
Path(sys.argv[1], f"{elche.rank()}.pid").write_text(str(os.getpid()))
for _ in elche.epochs(1000):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        elche.log_scalar("loss", loss.item())
