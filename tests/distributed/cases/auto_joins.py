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
from elche.session.process import current_run, failing_together
from tests.distributed.cases.auto_deaths import BATCH, BUILDING, SAMPLES, Ones, Visited
from tests.distributed.cases.joining_cases import (
    ENOUGH_BATCHES,
    MOST_EPOCHS,
    Growing,
    Grown,
    cloned,
    is_on_the_way_in,
    wait_for,
)
from tests.distributed.cases.survive_cases import Death, Indices, die


@dataclass(frozen=True, kw_only=True)
class AutoGrowing(Growing):
    """A run under ``auto`` that ranks join.

    Attributes:
        called_at: most ranks that live when the joiners are called.
        called_in: the policy that runs then; "" for any.
    """

    called_at: int = 3
    called_in: str = ""


@dataclass(frozen=True)
class AutoGrown(Grown):
    """With the policies that its loop has seen, and its batches."""

    policies: list[str]
    batches: int


def grow(growth: AutoGrowing) -> AutoGrown:
    """Trains until all newcomers have, or are gone."""
    with failing_together():
        return _grow(growth, int(os.environ["RANK"]))


def _grow(growth: AutoGrowing, rank: int) -> AutoGrown:
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
        windows=elche.WindowConfig(outer=elche.config.OuterConfig(optimizer="average")),
        **{"timeout_s": 60.0, "leave_out": False, **dict(growth.options)},
    )
    run, policies, batches, epochs = current_run(), list[str](), 0, 0
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
    grown = AutoGrown(
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


def hit_of(growth: AutoGrowing, death: Death) -> Callable[[], None]:
    """Dies there; for places in the loop returns what is to be called there."""
    visits = itertools.count(1)

    def visit() -> None:
        if next(visits) == death.at:
            growth.sign(death.rank).touch()
            die()

    if not is_on_the_way_in(death.place, visit) and death.place in BUILDING:
        BUILDING[death.place](visit)
    return visit
