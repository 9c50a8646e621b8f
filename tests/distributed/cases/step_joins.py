"""Ranks that join the steps of ``sync``, and the same run in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import elche
from elche.checkpoint.keeper import CheckpointKeeper
from elche.runtime.sync.step_groups import StepGroups
from elche.session.process import failing_together
from tests.distributed.cases.joining_cases import (
    ENOUGH_BATCHES,
    MOST_EPOCHS,
    Growing,
    Grown,
    cloned,
    is_on_the_way_in,
    raise_error,
    wait_for,
)
from tests.distributed.cases.step_deaths import (
    BATCH,
    Indices,
    Loop,
    batches_of,
    loss_of,
    make,
    options_of,
    plan_death,
    take_step,
)
from tests.distributed.cases.survive_cases import after, before, die


@dataclass(frozen=True, kw_only=True)
class StepGrowing(Growing):
    """A run under ``sync`` that ranks join.

    Attributes:
        called_at: ranks that live when the joiners are called.
        raises: the first joiner's script fails once it holds the state.
        accumulate: batches to an optimizer step.
        early: the next batch is asked for before the backward pass of the last one.
        loss: over a batch, "mean", "sum" or "weighted".
        freezes: the founders train fewer parameters from the second epoch on.
        samples: of an epoch.
        step_s: seconds of a step beside; of rank 1 ``slow`` times as many.
        slow: see ``step_s``.
    """

    called_at: int = 2
    raises: bool = False
    accumulate: int = 1
    early: bool = False
    loss: str = "mean"
    freezes: bool = False
    samples: int = 94
    step_s: float = 0.004
    slow: float = 1.0


@dataclass(frozen=True)
class StepGrown(Grown):
    """With the samples that its metrics have counted."""

    metrics: int


def schedule_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.optim.lr_scheduler.LRScheduler, AveragedModel]:
    """What moves along with each step."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.97)
    return schedule, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def grow(plan: StepGrowing) -> StepGrown:
    """Trains until all newcomers have, or are gone."""
    rank = int(os.environ["RANK"])
    with failing_together():
        try:
            return _grow(plan, rank)
        except Exception as error:  # who may be killed before it can say so
            plan.sign(rank).write_text(str(error))
            raise


def _grow(plan: StepGrowing, rank: int) -> StepGrown:
    is_joiner = rank in plan.newcomers
    loop = Loop(folder=plan.folder, loss=plan.loss)
    model, [optimizer] = make(loop)
    called = Path(plan.folder, "come")
    if is_joiner:
        wait_for(called)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # none of it may come into the run
    at = plan_faults(plan, rank, model)
    schedule, copy = schedule_of(model, optimizer)
    data = Indices(plan.samples, lambda: at["load"]())
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = elche.setup(
        *(model, optimizer, loader),
        policy="sync",
        schedulers=[schedule],
        copies=[copy],
        **{
            "timeout_s": 60.0,
            **options_of(loop),
            **dict(plan.options),
        },
    )
    slowness = plan.slow if rank == 1 else 1.0
    batches = epochs = 0
    with Path(plan.folder, f"log{rank}.txt").open("w") as log:

        def say(epoch: int, counts: list[int]) -> None:
            print(epoch, int(elche.progress_samples()), *counts, file=log, flush=True)

        for epoch in elche.epochs(MOST_EPOCHS):
            if plan.freezes and epoch == 1 and not is_joiner:
                next(model.parameters()).requires_grad_(False)
            for number, batch in enumerate(batches_of(loader, partial(say, epoch))):
                at["forward"]()
                time.sleep(plan.step_s * slowness)
                loss = loss_of(model, batch.now, plan.loss)
                if plan.early:
                    batch.fetch()
                loss.backward()
                at["step"]()
                if (number + 1) % plan.accumulate == 0:
                    take_step(model, [optimizer], 0.0)
                schedule.step()
                copy.update_parameters(model)
                batches += 1
                if is_joiner and batches == ENOUGH_BATCHES:
                    plan.sign(rank).touch()
                is_time = not is_joiner and elche.world_size() == plan.called_at
                is_time &= batches >= plan.called_after and plan.freezes <= epoch
                if is_time:
                    called.touch()
            epochs = epoch + 1
            at["between"]()
            if not elche.any(not all(plan.sign(r).exists() for r in plan.newcomers)):
                break
    grown = StepGrown(
        cloned(model),
        cloned(copy),
        schedule.get_last_lr()[0],
        elche.progress_samples(),
        epochs,
        elche.rank(),
        elche.world_size(),
        elche.epoch_metrics().samples,
    )
    elche.shutdown()
    return grown


def plan_faults(
    plan: StepGrowing, rank: int, model: nn.Module
) -> dict[str, Callable[[], None]]:
    """What a rank does at the places of its loop; elsewhere it dies, or fails."""
    at = {name: _nothing for name in ("load", "forward", "step", "between")}
    act = partial(_die_for_good, plan.sign(rank))
    for death in plan.deaths:
        if death.rank != rank:
            continue
        if is_on_the_way_in(death.place, act):
            continue
        if death.place == "building":
            before(StepGroups, "begin_anew", act)
        elif death.place == "built":
            after(StepGroups, "begin_anew", act)
        else:
            plan_death(death, at, model, act)
    if plan.raises and rank == plan.founders:
        after(CheckpointKeeper, "hand_over", raise_error)
    return at


def _nothing() -> None:
    """Nothing happens there."""


def _die_for_good(sign: Path) -> None:
    sign.touch()
    die()


def steps_in(
    plan: StepGrowing, epochs: int, victims: Sequence[int]
) -> list[dict[int, list[int]]]:
    """Per epoch the samples of each step, by the run's samples before it.

    A dead rank's batch counts in its step, unless its samples were given out again.
    """
    steps: list[dict[int, list[int]]] = [{} for _ in range(epochs)]
    ranks = range(plan.founders + plan.joiners)
    logs = {rank: _log_of(plan, rank) for rank in ranks}
    for rank in ranks:
        for epoch, before_it, batch in logs[rank] if rank not in victims else ():
            steps[epoch].setdefault(before_it, []).extend(batch)
    for rank in reversed(victims):
        for epoch, before_it, batch in logs[rank]:
            given = {index for step in steps[epoch].values() for index in step}
            if batch and not given & {*batch}:
                steps[epoch].setdefault(before_it, []).extend(batch)
            else:
                assert given >= {*batch}
    return [dict(sorted(each.items())) for each in steps]


def _log_of(plan: StepGrowing, rank: int) -> list[tuple[int, int, list[int]]]:
    path = Path(plan.folder, f"log{rank}.txt")
    if not path.exists():
        return []
    rows = [[*map(int, line.split())] for line in path.read_text().splitlines()]
    return [(epoch, before_it, batch) for epoch, before_it, *batch in rows]


def reference(
    plan: StepGrowing,
    epochs: Sequence[dict[int, list[int]]],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """The same steps in one process: model, its average, and the last rate."""
    model, [optimizer] = make(Loop(folder=plan.folder))
    schedule, copy = schedule_of(model, optimizer)
    for steps in epochs:
        for step in steps.values():
            if step:
                loss_of(model, torch.tensor(step), plan.loss).backward()
            take_step(model, [optimizer], 0.0)
            schedule.step()
            copy.update_parameters(model)
    return model.state_dict(), copy.state_dict(), schedule.get_last_lr()[0]
