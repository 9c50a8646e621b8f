"""Short epochs in which ranks die, counted by the model."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader

import elche
from tests.distributed.cases.counting import Indices, counts_of, made
from tests.distributed.cases.deaths import Death, plan_death
from tests.distributed.cases.tasks import state_of

SAMPLES, BATCH = 640, 16
POLICIES = ("sync", "cadence", "async", "auto")


def train(
    policy: str, epochs: int, deaths: tuple[Death, ...], saves: str = ""
) -> list[int]:
    """Trains and dies where planned; how often the model has seen each sample."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    loader: Any = DataLoader(Indices(SAMPLES), batch_size=BATCH, shuffle=True)
    more: dict[str, Any] = {}
    if policy != "sync":
        average = elche.config.OuterConfig(optimizer="average")
        more["windows"] = elche.WindowConfig(outer=average)
    model, optimizer, loader = elche.setup(
        *made(policy, SAMPLES), loader, policy=policy, timeout_s=60.0, **more
    )
    for death in deaths:
        if death.rank == rank:
            plan_death(death, {})
    for _ in elche.epochs(epochs):
        for index in loader:
            model(index).backward()
            optimizer.step()
            optimizer.zero_grad()
        if saves:
            elche.save(saves)
    counts = counts_of(state_of(model), policy)
    assert elche.progress_samples() == SAMPLES * epochs
    elche.shutdown()
    return counts
