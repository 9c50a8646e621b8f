"""Ranks whose ends their supervisor has to handle: `supervised.py KIND FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import elche


def main(kind: str, folder: str) -> None:
    """Before the first epoch ends rank 1 by its code, or kills it at one start."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=8)
    model, optimizer, loader = elche.setup(model, optimizer, data)
    died = Path(folder) / "died"
    is_last = elche.rank() == 1
    if kind == "exit" and is_last:
        sys.exit(3)
    if kind == "restart" and is_last and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (Path(folder) / f"ended-{elche.rank()}").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
