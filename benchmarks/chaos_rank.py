"""What every rank of `benchmarks/chaos.py` runs: training that counts its samples."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche import session
from elche.runtime.rank_settings import checksum

SAMPLES = 4_000
FEATURES = 32


class Counting(nn.Module):
    """Linear regression that counts how often it was trained on each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, 1)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What is predicted of these samples."""
        if self.training:
            self.count += torch.bincount(index, minlength=SAMPLES)
        out: torch.Tensor = self.line(x)[:, 0]
        return out


class Points(Dataset[Any]):
    """Index, features and what is to be learnt of them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        noise = 0.1 * torch.randn(SAMPLES, generator=generator)
        self.y = self.x @ torch.linspace(-1.0, 1.0, FEATURES) + noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


def train(spec: dict[str, Any]) -> None:
    """On every rank: trains until the time is over, or it is the last one."""
    torch.manual_seed(spec["seed"])
    model, points = Counting(), Points()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader: Any = DataLoader(points, batch_size=32, shuffle=True)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, policy=spec["policy"]
    )
    rank, epochs, is_early = int(os.environ["RANK"]), 0, False
    until_s = math.inf
    with Path(spec["folder"], f"log{rank}.txt").open("w") as log:
        while not is_early:
            for index, x, y in loader:
                log.write(f"{epochs} {' '.join(map(str, index.tolist()))}\n")
                log.flush()
                nn.functional.mse_loss(model(index, x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                _say(rank=rank, pid=os.getpid())
                until_s = min(until_s, time.monotonic() + spec["seconds"])
                if time.monotonic() >= until_s or elche.world_size() == 1:
                    break  # which ends the epoch for all
            run = session.current_run()
            is_early = run is None or run.was_left_early
            epochs += not is_early
    model.eval()
    with torch.no_grad():
        everything = torch.arange(SAMPLES)
        loss = nn.functional.mse_loss(model(everything, points.x), points.y)
    _say(
        rank=rank,
        epochs=epochs,
        counted=[int(model.count.min()), int(model.count.max())],
        samples=int(model.count.sum()),
        progress=elche.progress_samples(),
        checksum=checksum(model),
        loss=float(loss),
    )
    elche.shutdown()


_said: set[tuple[str, ...]] = set()


def _say(**values: Any) -> None:
    """One line for the parent; the same kind of line once."""
    if (kind := tuple(values)) not in _said:
        _said.add(kind)
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
