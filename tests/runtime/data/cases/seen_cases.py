"""Loops that log what they see: indices, weights of batches, sizes of shares."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from tests.harness.rank_main import this_place
from tests.harness.settings import nested

NOISY_STEPS = 30
BATCH = 64
LEAST_SHARE = 1.2
MOST_STEPS = 3000


@dataclass(frozen=True)
class Job:
    """A run whose first steps take any time on any rank.

    Attributes:
        policy: of the run.
        samples: of an epoch; they come in their order.
        batch_size: of all ranks.
        norm: the model has a BatchNorm layer.
        options: fields of `elche.RunConfig`, as pairs.
    """

    policy: str
    samples: int = 7 * 40 + 2
    batch_size: int = 7
    norm: bool = False
    options: tuple[tuple[str, Any], ...] = ()


class Seen(NamedTuple):
    """A batch as a loop sees it."""

    epoch: int
    indices: list[int]
    weight: float


def watch(job: Job) -> list[Seen]:
    """Two epochs; what the loop of this rank has seen."""
    torch.manual_seed(0)
    noise = random.Random(this_place().rank)
    layers = [nn.Linear(1, 4), nn.BatchNorm1d(4)] if job.norm else [nn.Linear(1, 4)]
    model = nn.Sequential(*layers)
    data = TensorDataset(torch.arange(float(job.samples)).unsqueeze(1))
    model, optimizer, loader = elche.setup(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        DataLoader(data, batch_size=job.batch_size),
        epochs=2,
        policy=job.policy,
        **nested(dict(job.options)),
    )
    seen = []
    try:
        assert elche.batch_weight() == 0.0
        for epoch in range(2):
            for number, (x,) in enumerate(loader):
                indices = [int(value) for value in x[:, 0]]
                seen.append(Seen(epoch, indices, elche.batch_weight()))
                if epoch == 0 and number < NOISY_STEPS:
                    time.sleep(0.001 * noise.random() ** 3 * 20)  # what a step takes
                optimizer.zero_grad()
                model(x / job.samples).square().mean().backward()
                optimizer.step()
    finally:
        elche.shutdown()
    return seen


class Shares(NamedTuple):
    """What became of the share of rank 1, in samples of a batch."""

    before: float
    fallen: float
    back: float
    steps_to_be_back: int


def slowed_for_a_while(folder: str) -> Shares:
    """Trains until rank 1 was slowed down and has its share back, or for long.

    The file `slow` asks whoever runs the ranks to slow rank 1 down. As the two shares
    are a batch together, both ranks do the same at the same step.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(768, 10))
    data = TensorDataset(torch.randn(BATCH * 100, 512))
    model, optimizer, loader = elche.setup(
        model,
        torch.optim.AdamW(model.parameters()),
        DataLoader(data, batch_size=BATCH),
        policy="sync",
    )
    rank, asks = this_place().rank, Path(folder, "slow")
    recent: deque[int] = deque(maxlen=40)
    found: list[float] = []
    steps = released_at = 0
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    try:
        while len(found) < 3 and steps - released_at < MOST_STEPS:
            for (x,) in loader:
                recent.append(len(x) if rank == 1 else BATCH - len(x))
                steps += 1
                share = fmean(recent)
                if len(recent) == 40 and _is_reached(found, share, steps):
                    found.append(share)
                    released_at = steps if len(found) == 2 else released_at
                    if rank == 0 and len(found) == 1:
                        asks.touch()
                    elif rank == 0:
                        asks.unlink(missing_ok=True)
                    recent.clear()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if len(found) == 3 or steps - released_at == MOST_STEPS:
                    break
    finally:
        elche.shutdown()
    return Shares(*[*found, 0.0, 0.0, 0.0][:3], steps - released_at)


def _is_reached(found: list[float], share: float, steps: int) -> bool:
    """Whether what comes next is: some steps, next to no share, then most of it."""
    if not found:
        return steps >= 100
    if len(found) == 1:
        return share <= LEAST_SHARE
    return share >= 0.75 * found[0]


def shares_after_warm_up(cold_s: tuple[float, ...], steps: int) -> list[int]:
    """Sizes of this rank's share of each step; the first ones take longer."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.randn(BATCH * steps, 1))
    model, optimizer, loader = elche.setup(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        DataLoader(data, batch_size=BATCH),
        policy="sync",
        epochs=1,
    )
    sizes = []
    try:
        for number, (x,) in enumerate(loader):
            sizes.append(len(x))
            time.sleep(sum(cold_s[number : number + 1]))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    finally:
        elche.shutdown()
    return sizes
