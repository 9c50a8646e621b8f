"""A user's script that is watched: `python watched.py raises|killed|ends`."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled  # noqa: F401 - starts faster


def _train(how: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(640, 4)), batch_size=16)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for number, (x,) in enumerate(loader):
        if number in (10, 15, 20):
            print(f"rank {elche.rank()} printed [line] {number // 5 - 1}")
        if number == 35 and elche.rank() == 1:
            if how == "raises":
                raise RuntimeError("as asked")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    _train(sys.argv[1])
