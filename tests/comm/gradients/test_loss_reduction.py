"""Losses that are means or sums: one process on the union batch, at any shares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elche
from tests.distributed.cases.tasks import (
    COMMON_STEPS,
    Task,
    build,
    difference,
    identical,
)
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
BOUND = 1e-12
RATE = {"mean": 0.1, "sum": 0.1 / 16}


@dataclass(frozen=True)
class Job:
    """A task, how its loss is reduced, and backward passes per optimizer step."""

    task: Task
    loss: str
    passes: int = 1
    sync_norm: bool = False


def on_ranks(job: Job) -> State:
    """The job on this rank of a run."""
    return _train(job, is_shared=True)


def alone(job: Job) -> State:
    """The job in this process, by plain PyTorch alone."""
    return _train(job, is_shared=False)


def _train(job: Job, *, is_shared: bool) -> State:
    model, _, loader = build(job.task)
    rate = RATE[job.loss]
    if is_shared and job.sync_norm:
        model = elche.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if is_shared:
        options = {"loss_reduction": job.loss, **job.task.options}
        model, optimizer, loader = elche.setup(
            model, optimizer, loader, **nested(options)
        )
    for _ in range(job.task.epochs):
        for number, (x, y, *_) in enumerate(loader):
            F.cross_entropy(model(x), y, reduction=job.loss).backward()
            # What a user asks for beside the step is not reduced, and not scaled.
            weights = [p for p in model.parameters() if p.dim() > 1]
            penalty = torch.autograd.grad(weights[0].square().sum(), weights[:1])
            assert torch.equal(penalty[0], 2 * weights[0])
            if number % job.passes == job.passes - 1:
                optimizer.step()
                optimizer.zero_grad()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    elche.shutdown()
    return state


def _check(pool: RankPool, job: Job, reference: State, **pool_options: Any) -> None:
    states = pool.run(on_ranks, job, case_setup=serve_in_thread, **pool_options)
    assert identical(states)
    assert difference(states[0], reference) <= BOUND


SYNC = Task(
    samples=16 * 12 + 5,
    epochs=1,
    dtype="float64",
    options={"policy": "sync", "speed_hints": (1.0, 0.25)},
)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_steps_of_unequal_shares(ranks2: RankPool, loss: str, passes: int) -> None:
    """Twice a gradient is added to what the ranks have already summed."""
    job = Job(SYNC, loss, passes)
    _check(ranks2, job, alone(job), env=FOUR_TO_ONE)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_batch_norm_over_the_union(ranks2: RankPool, loss: str) -> None:
    task = dataclasses.replace(SYNC, samples=64, model="norm")
    job = Job(task, loss, sync_norm=True)
    states = ranks2.run(on_ranks, job, case_setup=serve_in_thread, env=FOUR_TO_ONE)
    assert difference(states[0], alone(job)) <= 1e-11


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_gradient_windows_of_unequal_shares(ranks2: RankPool, loss: str) -> None:
    """Windows of two batches and one: every step is one on three batches' samples."""
    task = Task(
        samples=16 * 3 * 6 + 20,
        epochs=2,
        dtype="float64",
        shuffle=False,
        options={**COMMON_STEPS, "local_batch_size": 16},
    )
    job = Job(task, loss)
    union = Job(dataclasses.replace(task, batch_size=48), loss)
    _check(ranks2, job, alone(union))
