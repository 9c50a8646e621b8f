"""A model that counts its samples, and loops' logs: two accounts of what was trained.

A file outlives its rank, and a counter in the model travels with every commit.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import elche
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.session.process import current_run

BY_STEPS = ("sync", "auto")
"""Policies in whose steps weights count, and in windows a buffer."""


class Indices(Dataset[int]):
    """Samples that are their own index."""

    def __init__(self, length: int, on_load: Callable[[], object] = int) -> None:
        self._length, self._on_load = length, on_load

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        self._on_load()
        return index


class Counter(nn.Module):
    """Counts how often each sample was trained on; a BatchNorm beside.

    In windows a buffer counts. In steps weights do, which `Ones` moves by one.
    """

    def __init__(self, samples: int, *, by_steps: bool) -> None:
        super().__init__()
        self._by_steps = by_steps
        self.w = nn.Parameter(torch.zeros(samples))
        self.norm = nn.BatchNorm1d(2)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(samples, dtype=torch.int64))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.pad(index, (0, 1)).float()
        beside = 0.0 * self.norm(torch.stack([rows, rows.sin()], 1)).sum()
        run = current_run()
        if run is not None and isinstance(run.epochs.under_way, WindowEpoch):
            self.count += torch.bincount(index, minlength=len(self.count))
            return (not self._by_steps) * self.w[index].sum() + beside
        return self.w[index].mean() + beside


class Ones(torch.optim.SGD):
    """Steps by one where there is a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign())


def made(
    policy: str, samples: int, **options: float
) -> tuple[Counter, torch.optim.SGD]:
    """Model and optimizer by which a run under this policy counts."""
    counter = Counter(samples, by_steps=policy in BY_STEPS)
    kind = Ones if policy in BY_STEPS else torch.optim.SGD
    return counter, kind(counter.parameters(), **{"lr": 1.0, **options})


def counts_of(state: dict[str, torch.Tensor], policy: str) -> list[int]:
    """How often the model was trained on each sample."""
    counts = state["count"] - (state["w"] if policy in BY_STEPS else 0)
    return [int(count) for count in counts]


def log_batch(folder: str, epoch: int, at: float, index: torch.Tensor) -> None:
    """A batch that this rank's loop was handed; without samples where it is for show.

    Args:
        folder: of the logs, one per rank.
        epoch: of the batch.
        at: its place in the epoch, as the test counts.
        index: its samples.
    """
    counts = index.tolist() if elche.batch_weight() else []
    with Path(folder, f"log{os.environ['RANK']}.txt").open("a") as log:
        print(epoch, int(at), *counts, file=log)


def rows_of(folder: str | Path, rank: int) -> list[tuple[int, int, list[int]]]:
    """Epoch, place and samples of each batch that a rank's loop was handed."""
    path = Path(folder, f"log{rank}.txt")
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [[*map(int, line.split())] for line in lines]
    return [(epoch, at, batch) for epoch, at, *batch in rows]


def handed(folder: str | Path, ranks: int) -> collections.Counter[tuple[int, int]]:
    """How often loops were handed each sample of each epoch."""
    return collections.Counter(
        (epoch, index)
        for rank in range(ranks)
        for epoch, _, batch in rows_of(folder, rank)
        for index in batch
    )
