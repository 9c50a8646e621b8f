"""Ranks that join a run under ``auto``, and what all count of it at its end."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import elche
from elche import session
from elche.checkpoint.keeper import CheckpointKeeper
from elche.coordination.protocol.events import EpochOpened, JoinReady
from tests.distributed.cases.auto_deaths import BATCH, BUILDING, SAMPLES, Ones, Visited
from tests.distributed.cases.joining_cases import cloned, wait_for
from tests.distributed.cases.step_joins import ENOUGH_BATCHES, MOST_EPOCHS
from tests.distributed.cases.survive_cases import (
    Death,
    Indices,
    after,
    before,
    die,
    visit_events,
)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A run that ranks join.

    Attributes:
        folder: of logs and signs.
        founders: ranks that it begins with.
        joiners: ranks that join it.
        deaths: of any of them.
        called_at: most ranks that live when the joiners are called.
        called_in: the policy that runs then; "" for any.
        called_after: batches of a rank before.
        options: of `elche.setup`.
    """

    folder: str
    founders: int = 2
    joiners: int = 1
    deaths: tuple[Death, ...] = ()
    called_at: int = 3
    called_in: str = ""
    called_after: int = 3
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def newcomers(self) -> range:
        """Their ranks."""
        return range(self.founders, self.founders + self.joiners)

    def sign(self, rank: int) -> Path:
        """The run need not go on for this newcomer any more."""
        return Path(self.folder, f"over{rank}")


@dataclass(frozen=True)
class Grown:
    """What a rank that lives has at the end."""

    state: dict[str, torch.Tensor]
    copy: dict[str, torch.Tensor]
    rate: float
    progress: float
    epochs: int
    place: int
    world_size: int
    policies: list[str]
    batches: int


def grow(growth: Growth) -> Grown:
    """Trains until all newcomers have, or are gone."""
    with session.failing_together():
        return _grow(growth, int(os.environ["RANK"]))


def _grow(growth: Growth, rank: int) -> Grown:
    is_joiner, called = rank in growth.newcomers, Path(growth.folder, "come")
    torch.manual_seed(5)
    model = Visited()
    if is_joiner:
        wait_for(called)
        torch.nn.init.uniform_(model.w)  # none of it may come into the run
    hits = {
        death.place: hit_of(growth, death)
        for death in growth.deaths
        if death.rank == rank
    }
    optimizer = Ones(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.99)
    copy = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader: Any = DataLoader(Indices(SAMPLES), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = elche.setup(
        *(model, optimizer, loader),
        policy="auto",
        schedulers=[schedule],
        copies=[copy],
        windows=elche.WindowConfig(outer=elche.OuterConfig(optimizer="average")),
        **{"timeout_s": 60.0, "leave_out": False, **dict(growth.options)},
    )
    run, policies, batches, epochs = session.current_run(), list[str](), 0, 0
    assert run is not None
    with Path(growth.folder, f"log{rank}.txt").open("w") as log:
        for epoch in elche.epochs(MOST_EPOCHS):
            for index in loader:
                counts = index.tolist() if elche.batch_weight() else []
                print(epoch, *counts, file=log, flush=True)
                if policies[-1:] != [run.policy]:
                    policies.append(run.policy)
                loss = model(index, in_windows=run.policy != "sync")
                hits.get("forward", int)()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                copy.update_parameters(model)
                time.sleep(0.001)
                hits.get("batch", int)()
                batches += 1
                if is_joiner and batches == ENOUGH_BATCHES:
                    growth.sign(rank).touch()
                is_time = elche.world_size() <= growth.called_at
                is_time &= growth.called_in in ("", run.policy)
                if is_time and batches >= growth.called_after:
                    called.touch()
            epochs = epoch + 1
            hits.get("between", int)()
            lacks = [not growth.sign(each).exists() for each in growth.newcomers]
            if not elche.any(any(lacks)):
                break
    grown = Grown(
        cloned(model),
        cloned(copy),
        schedule.get_last_lr()[0],
        elche.progress_samples(),
        epochs,
        elche.rank(),
        elche.world_size(),
        policies,
        batches,
    )
    elche.shutdown()
    return grown


def hit_of(growth: Growth, death: Death) -> Callable[[], None]:
    """Dies there; for places in the loop returns what is to be called there."""
    visits = itertools.count(1)

    def visit() -> None:
        if next(visits) == death.at:
            growth.sign(death.rank).touch()
            die()

    if death.place == "handing":
        before(CheckpointKeeper, "hand_over", visit)
    elif death.place == "handed":
        after(CheckpointKeeper, "hand_over", visit)
    elif death.place == "ready":
        visit_events(JoinReady, visit, is_before=False)
    elif death.place == "opening":
        visit_events(EpochOpened, visit, is_before=True)
    elif death.place in BUILDING:
        BUILDING[death.place](visit)
    return visit
