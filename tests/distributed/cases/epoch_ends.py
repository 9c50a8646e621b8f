"""Short epochs in which ranks die, counted by the model."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader

import elche
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.session.process import current_run
from tests.distributed.cases.auto_deaths import Ones, Visited
from tests.distributed.cases.meetings import Meeting
from tests.distributed.cases.survive_cases import Death, Indices, plan_death

SAMPLES, BATCH = 640, 16
POLICIES = ("sync", "cadence", "async", "auto")


def train(
    policy: str, epochs: int, deaths: tuple[Death, ...], saves: str = ""
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Trains and dies where planned; the model's state, and visits of each sample."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    model = Visited()
    optimizer: Any = Ones(model.parameters(), lr=1.0)
    loader: Any = DataLoader(Indices(SAMPLES), batch_size=BATCH, shuffle=True)
    more: dict[str, Any] = {}
    if policy != "sync":
        average = elche.config.OuterConfig(optimizer="average")
        more["windows"] = elche.WindowConfig(outer=average)
    model, optimizer, loader = elche.setup(
        *(model, optimizer, loader), policy=policy, timeout_s=60.0, **more
    )
    for death in deaths:
        if death.rank == rank:
            plan_death(death, "", Meeting("barrier", "", rank))
    run = current_run()
    for _ in elche.epochs(epochs):
        for index in loader:
            in_windows = isinstance(run.epochs.under_way, WindowEpoch)
            model(index, in_windows=in_windows).backward()
            optimizer.step()
            optimizer.zero_grad()
        if saves:
            elche.save(saves)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert elche.progress_samples() == SAMPLES * epochs
    elche.shutdown()
    return state, [int(visits) for visits in state["count"] - state["w"]]
