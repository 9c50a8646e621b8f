"""A run under ``auto`` in which ranks die, and what the others count of it.

A step moves the weight of each of its samples by one, whatever their gradients; in
windows a counter in the model counts them. So the model holds each visit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import elche
from elche.comm.model_buffers.known_buffers import KnownBuffers
from elche.runtime.epochs.epoch_opening import EpochOpening
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.runtime.windows.synchroniser import Synchroniser
from elche.session.process import current_run
from tests.distributed.cases.meetings import Meeting
from tests.distributed.cases.survive_cases import (
    Death,
    Indices,
    after,
    before,
    die,
    plan_death,
)

SAMPLES, BATCH, EPOCHS = 640, 16, 3
BUILDING: dict[str, Callable[[Callable[[], None]], None]] = {
    "before building": lambda visit: before(Synchroniser, "build", visit),
    "inside building": lambda visit: before(KnownBuffers, "agree", visit),
    "after building": lambda visit: after(Synchroniser, "build", visit),
    "after meeting": lambda visit: after(EpochOpening, "build", visit),
}
"""Where ranks go over to steps or windows, in order."""


@dataclass(frozen=True)
class Counted:
    """What a rank that lives has at the end."""

    state: dict[str, torch.Tensor]
    progress: float
    place: int
    world_size: int
    policies: list[str]


class Ones(torch.optim.SGD):
    """Steps by one where there is a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign())


class Visited(nn.Module):
    """A weight for each sample, a counter of windows', and a BatchNorm beside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(2)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, index: torch.Tensor, *, in_windows: bool) -> torch.Tensor:
        noise = 0.0 * self.norm(torch.randn(len(index) + 1, 2)).sum()
        if in_windows:
            self.count += torch.bincount(index, minlength=SAMPLES)
            return 0.0 * self.w[index].sum() + noise
        return self.w[index].mean() + noise


def train(folder: str, deaths: tuple[Death, ...], options: dict[str, Any]) -> Counted:
    """Trains, dies where planned, and says what it has at the end."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    model = Visited()
    optimizer = Ones(model.parameters(), lr=1.0)
    loader: Any = DataLoader(Indices(SAMPLES), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = elche.setup(
        model,
        optimizer,
        loader,
        policy="auto",
        epochs=EPOCHS,
        windows=elche.WindowConfig(outer=elche.config.OuterConfig(optimizer="average")),
        **{"timeout_s": 60.0, **options},
    )
    meet, hits = Meeting("barrier", folder, rank), dict[str, Callable[[], object]]()
    for death in deaths:
        if death.rank == rank:
            hits[death.place] = plan(death, folder, meet)
    run, policies = current_run(), list[str]()
    assert run is not None
    with Path(folder, f"log{rank}.txt").open("w") as log:
        for epoch in range(EPOCHS):
            for index in loader:
                if elche.batch_weight():
                    log.write(f"{epoch} {' '.join(map(str, index.tolist()))}\n")
                    log.flush()
                if policies[-1:] != [run.policy]:
                    policies.append(run.policy)
                in_windows = isinstance(run.epochs.under_way, WindowEpoch)
                loss = model(index, in_windows=in_windows)
                hits.get("forward", int)()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.001)
                hits.get("batch", int)()
            hits.get("between", int)()
            meet()
    counted = Counted(
        {name: value.clone() for name, value in model.state_dict().items()},
        elche.progress_samples(),
        elche.rank(),
        elche.world_size(),
        policies,
    )
    elche.shutdown()
    return counted


def plan(death: Death, folder: str, meet: Meeting) -> Callable[[], object]:
    """Dies there; for places in the loop returns what is to be called there."""
    if death.place not in BUILDING:
        return plan_death(death, folder, meet)
    visits = 0

    def visit() -> None:
        nonlocal visits
        visits += 1
        if visits == death.at:
            die()

    BUILDING[death.place](visit)
    return visit
