"""Functions that `elche.launch` runs, and a script that calls it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import elche


def trained(learning_rate: float) -> tuple[int, list[float]]:
    """The parameters after an epoch, and the number of ranks."""
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, batches = elche.setup(model, optimizer, loader)
    for inputs, targets in batches:
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
    print("rank", elche.rank(), "has trained")
    return elche.world_size(), model.weight.flatten().tolist()


def fails_on_rank_1(how: str) -> Any:
    """Rank 0 waits for rank 1, which ends."""
    model = torch.nn.Linear(1, 1)
    data = TensorDataset(torch.ones(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elche.setup(model, optimizer, DataLoader(data, batch_size=4))
    if elche.rank() == 1:
        if how == "raise":
            raise KeyError("no such thing")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
    elche.barrier()


def outlives_rank_0() -> tuple[int, int, float]:
    """Who is the main process in the end, of how many, and the run's samples."""
    own = elche.rank()
    model = torch.nn.Linear(1, 1)
    data = TensorDataset(torch.ones(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    _, _, batches = elche.setup(model, optimizer, loader, policy="cadence")
    for _ in range(2):
        for number, (inputs,) in enumerate(batches):
            if (own, number) == (0, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
    ended = elche.rank(), elche.world_size(), elche.progress_samples()
    elche.shutdown()
    assert elche.is_main_process() == (ended[0] == 0)
    return ended


def waits() -> None:
    """Until it is interrupted."""
    print("waiting", flush=True)
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        elche.launch(waits, 2)
    else:
        print("returned", elche.launch(trained, speeds=[1.0, 0.5], args=(0.1,)))
