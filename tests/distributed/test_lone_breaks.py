"""One rank leaves an epoch of `sync` by itself: nobody stalls, and means stay means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.session.process import current_run
from tests.distributed.cases.tasks import (
    Task,
    begin,
    build,
    difference,
    error_of,
    identical,
    state_of,
    take_step,
)
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

STEPS, BATCH = 24, 12


@dataclass
class Found:
    """What a rank trained on and holds."""

    steps: list[list[list[int]]] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    after_break: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""


def leave(task: Task, places: dict[int, tuple[int, str]]) -> Found:
    """Two epochs; these ranks leave the first in a step, at a place in its body."""
    found = Found()
    found.error = error_of(_train, found, task, places)
    return found


def _train(found: Found, task: Task, places: dict[int, tuple[int, str]]) -> None:
    options: dict[str, Any] = {"timeout_s": 100.0, **task.options}
    model, optimizer, loader = begin(task, **options)
    run = current_run()
    assert run is not None
    for epoch in range(2):
        at = places.get(elche.rank(), (-1, ""))
        steps: list[list[int]] = []
        for number, (x, y, index, _) in enumerate(loader):
            leaves = at[1] if (epoch, number) == (0, at[0]) else ""
            if leaves == "begin":
                break
            reduction = task.options.get("loss_reduction", "mean")
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            steps.append(index.tolist() if run.current_samples else [])
            if leaves == "backward":
                break
            optimizer.step()
            optimizer.zero_grad()
            if leaves == "end":
                break
        found.steps.append(steps)
        found.progress.append(elche.progress_samples())
        found.samples.append(elche.epoch_metrics().samples)
        if epoch == 0:
            found.after_break = state_of(model)
    found.state = state_of(model)


def alone(task: Task, ranks: list[Found]) -> dict[str, torch.Tensor]:
    """One process trains on what they have trained on, step by step."""
    model, optimizer, loader = build(task)
    data: Any = loader.dataset
    for epoch in range(2):
        for number in range(max(len(rank.steps[epoch]) for rank in ranks)):
            parts = [r.steps[epoch][number : number + 1] for r in ranks]
            index = [one for part in parts for each in part for one in each]
            F.cross_entropy(model(data.x[index]), data.y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model)


def task_of(**changes: Any) -> Task:
    options = {"policy": "sync", **changes.pop("options", {})}
    kept = {"samples": STEPS * BATCH, "batch_size": BATCH, "dtype": "float64"}
    return Task(**{**kept, "optimizer": "adamw", **changes}, options=options)


def left(pool: RankPool, task: Task, places: dict[int, tuple[int, str]]) -> list[Found]:
    """Such a run, in which all ranks hold the same after each epoch."""
    ranks = pool.serve(leave, task, places)
    assert [rank.error for rank in ranks] == [""] * len(ranks)
    assert identical([rank.after_break for rank in ranks])
    assert identical([rank.state for rank in ranks])
    return ranks


PLACES: list[tuple[str, dict[int, tuple[int, str]]]] = [
    ("auto", {0: (7, "end")}),
    ("gloo", {0: (7, "end")}),
    ("gloo", {1: (7, "begin")}),
    ("auto", {2: (0, "begin")}),
    ("auto", {1: (7, "backward")}),
    ("gloo", {0: (5, "end"), 2: (6, "begin")}),
    ("auto", {1: (STEPS - 1, "end")}),
    ("auto", {0: (3, "end"), 1: (4, "begin"), 2: (5, "end")}),
]


@pytest.mark.parametrize(("transport", "places"), PLACES, ids=str)
@pytest.mark.every(2)
def test_the_others_end_what_was_granted_and_all_hold_its_model(
    ranks3: RankPool, places: dict[int, tuple[int, str]], transport: str
) -> None:
    # Once: they stalled for 60 s, and the run ended.
    task = task_of(options={"transport": transport})
    ranks = left(ranks3, task, places)
    assert len({tuple(rank.progress) for rank in ranks}) == 1
    seen = [i for rank in ranks for step in rank.steps[1] for i in step]
    assert sorted(seen) == list(range(task.samples))
    if min(step for step, _ in places.values()):  # else Adam forgets the first steps
        assert difference(ranks[0].state, alone(task, ranks)) <= 1e-10


def test_ranks_that_leave_one_step_before_and_after_its_optimizer(
    ranks3: RankPool,
) -> None:
    # Once: all had left after the same step, so nobody took a model over.
    places = {0: (5, "backward"), 1: (5, "end"), 2: (5, "end")}
    left(ranks3, task_of(), places)


@pytest.mark.parametrize("model", ["norm", "unused"])
def test_buffers_and_unused_parameters(ranks2: RankPool, model: str) -> None:
    task = task_of(model=model, optimizer="sgd")
    ranks = left(ranks2, task, {0: (7, "end")})
    if model == "norm":  # a mean over a rank that sends zeros would halve it
        assert ranks[0].after_break["1.running_var"].min() > 0.3


def test_gradients_that_travel_encoded(ranks3: RankPool) -> None:
    task = task_of(dtype="float32", options={"codec": "int8"}, optimizer="sgd")
    places = {0: (5, "end"), 2: (6, "begin")}
    ranks = left(ranks3, task, places)
    assert 1e-6 < difference(ranks[0].state, alone(task, ranks)) <= 0.02


def test_a_loss_that_is_a_sum(ranks2: RankPool) -> None:
    task = task_of(options={"loss_reduction": "sum"}, optimizer="sgd")
    left(ranks2, task, {0: (7, "end")})


def _with_sync_batch_norm(places: dict[int, int]) -> None:
    model, optimizer, loader = build(task_of(model="norm"))
    model = elche.convert_sync_batchnorm(model)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for number, (x, y, *_) in enumerate(loader):
        take_step(model, optimizer, x, y)
        if number == places.get(elche.rank()):
            break
    elche.barrier()


def test_sync_batch_norm_needs_all_ranks(ranks2: RankPool) -> None:
    for said in ranks2.serve(error_of, _with_sync_batch_norm, {0: 7}):
        assert "rank 0 left epoch 0 after step 8, and rank 1 did not" in said
        assert "SyncBatchNorm layers need every rank" in said
    assert ranks2.serve(error_of, _with_sync_batch_norm, {0: 7, 1: 7}) == ["", ""]


def _with_scheduler() -> None:
    model, optimizer, loader = build(task_of())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _ in range(2):
        for number, (x, y, *_) in enumerate(loader):
            take_step(model, optimizer, x, y)
            scheduler.step()
            if elche.rank() == 1 and number == 3:
                break


def test_a_scheduler_that_is_behind_is_named(ranks2: RankPool) -> None:
    _, said = ranks2.serve(error_of, _with_scheduler)
    assert "rank 1 left epoch 0 earlier than rank 0" in said
    assert "its scheduler is behind" in said
