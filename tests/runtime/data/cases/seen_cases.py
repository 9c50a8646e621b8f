"""Loops that log what they see: indices and weights of batches."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from tests.harness.rank_main import this_place
from tests.harness.settings import nested

NOISY_STEPS = 30


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
