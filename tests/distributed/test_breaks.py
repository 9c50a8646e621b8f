"""Ranks leave an epoch early: nobody stalls, means stay means, the next is whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.runtime.epochs.window_epoch import WindowEpoch
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
from tests.harness.choices import wanted as wanted
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

STEPS, BATCH = 24, 12
POLICIES = ["sync", "cadence", "async", "auto"]
IN_WINDOWS = "end, in windows"

Places = dict[int, tuple[int, str]]
"""Of ranks that leave an epoch: the batch, and the place in the loop's body.

In windows of `auto` the how manyth batch in windows, from 1 on.
"""


@dataclass
class Found:
    """What a rank trained on and holds, by epochs; and how often its loop broke off."""

    steps: list[list[list[int]]] = field(default_factory=list)
    metrics: list[elche.monitor.EpochMetrics] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    breaks: int = 0
    error: str = ""


def leave(task: Task, plan: list[Places]) -> Found:
    """Epochs of which ranks leave some."""
    found = Found()
    found.error = error_of(_train, found, task, plan)
    return found


def _train(found: Found, task: Task, plan: list[Places]) -> None:
    options: dict[str, Any] = {"timeout_s": 100.0, **task.options}
    model, optimizer, loader = begin(task, **options)
    run = current_run()
    assert run is not None
    for places in plan:
        at = places.get(elche.rank(), (-1, ""))
        steps: list[list[int]] = []
        in_windows = 0
        for number, (x, y, index, _) in enumerate(loader):
            in_windows += isinstance(run.epochs.under_way, WindowEpoch)
            count = in_windows if at[1] == IN_WINDOWS else number
            leaves = at[1] if count == at[0] else ""
            found.breaks += bool(leaves)
            if leaves == "begin":
                break
            reduction = task.options.get("loss_reduction", "mean")
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            elche.log_scalar("seen", 1.0)
            steps.append(index.tolist() if run.current_samples else [])
            if leaves == "backward":
                break
            optimizer.step()
            optimizer.zero_grad()
            if leaves:
                break
        found.steps.append(steps)
        found.metrics.append(elche.epoch_metrics())
        found.progress.append(elche.progress_samples())
        found.states.append(state_of(model))


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


def left(pool: RankPool, task: Task, *plan: Places) -> list[Found]:
    """A run in which all ranks hold the same after each epoch; the last is whole."""
    ranks = pool.serve(leave, task, [*plan, {}])
    first = ranks[0]
    assert [rank.error for rank in ranks] == [""] * len(ranks)
    assert [rank.metrics for rank in ranks] == [first.metrics] * len(ranks)
    assert [rank.progress for rank in ranks] == [first.progress] * len(ranks)
    samples = [each.samples for each in first.metrics]
    assert first.progress == [*accumulate(samples)]
    for epoch, places in enumerate([*plan, {}]):
        assert identical([rank.states[epoch] for rank in ranks])
        seen = [i for rank in ranks for step in rank.steps[epoch] for i in step]
        assert len(seen) == len(set(seen))
        if all(place.startswith("end") for _, place in places.values()):
            assert len(seen) == samples[epoch]
        if seen:  # a batch counts from when the loop has it, and may be left before
            assert first.metrics[epoch].scalars == {"seen": pytest.approx(1.0)}
    assert samples[-1] == task.samples
    return ranks


PLACES: list[tuple[str, Places]] = [
    ("auto", {0: (7, "end")}),
    ("gloo", {0: (7, "end")}),
    ("gloo", {1: (7, "begin")}),
    ("auto", {2: (0, "begin")}),
    ("auto", {1: (7, "backward")}),
    ("gloo", {0: (5, "end"), 2: (6, "begin")}),
    ("auto", dict.fromkeys(range(3), (2, "end"))),
    ("auto", {1: (STEPS - 1, "end")}),
    ("auto", {0: (3, "end"), 1: (4, "begin"), 2: (5, "end")}),
]


@pytest.mark.parametrize(("transport", "places"), PLACES, ids=str)
@pytest.mark.every(2)
def test_the_others_end_what_was_granted_and_all_hold_its_model(
    ranks3: RankPool, places: Places, transport: str
) -> None:
    # Once: they stalled for 60 s, and the run ended.
    task = task_of(options={"transport": transport})
    ranks = left(ranks3, task, places)
    if min(step for step, _ in places.values()):  # else Adam forgets the first steps
        assert difference(ranks[0].states[-1], alone(task, ranks)) <= 1e-10


def test_ranks_that_leave_one_step_before_and_after_its_optimizer(
    ranks3: RankPool,
) -> None:
    # Once: all had left after the same step, so nobody took a model over.
    places = {0: (5, "backward"), 1: (5, "end"), 2: (5, "end")}
    left(ranks3, task_of(), places)


@pytest.mark.parametrize(
    ("policy", "at"),
    [
        ("async", (2, IN_WINDOWS)),
        ("cadence", (2, IN_WINDOWS)),
        # Before the switch to windows, or while it is on its way.
        ("async", (1, "end")),
    ],
)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
@pytest.mark.every(4)
def test_an_epoch_of_auto_is_left(
    ranks2: RankPool,
    wanted: Callable[..., None],
    who: tuple[int, ...],
    policy: str,
    at: tuple[int, str],
) -> None:
    """Before and after it has chosen windows."""
    wanted((policy, ()), steps=1)
    task = task_of(samples=480, batch_size=8, options={"policy": "auto"})
    ranks = left(ranks2, task, dict.fromkeys(who, at))
    assert sum(rank.breaks for rank in ranks) >= 1


def often(pool: RankPool, policy: str, epochs: int, seed: int) -> int:
    """In each epoch one to all of the ranks leave, each in a step of its own.

    Returns:
        How often loops broke off; in windows some have too few batches for that.
    """
    draw, task = random.Random(seed), task_of(samples=240, options={"policy": policy})
    plan: list[Places] = []
    for _ in range(epochs):
        leavers = draw.sample(range(pool.world_size), draw.randint(1, pool.world_size))
        ways = ["begin", "backward", "end"]
        plan.append({r: (draw.randrange(6), draw.choice(ways)) for r in leavers})
    return sum(rank.breaks for rank in left(pool, task, *plan))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.every(3)
def test_breaks_on_random_ranks_stall_nobody(ranks3: RankPool, policy: str) -> None:
    # Once for 60 s and more, which ended the run.
    assert often(ranks3, policy, 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "epochs"), [("ranks2", 44), ("ranks3", 32)])
@pytest.mark.parametrize("policy", POLICIES)
def test_breaks_again_and_again(
    request: pytest.FixtureRequest, pool: str, epochs: int, policy: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    breaks = sum(often(ranks, policy, epochs, seed) for seed in range(4))
    assert breaks >= 60  # 100 and more where ranks are not kept from their batches


@pytest.mark.parametrize("model", ["norm", "unused"])
def test_buffers_and_unused_parameters(ranks2: RankPool, model: str) -> None:
    task = task_of(model=model, optimizer="sgd")
    ranks = left(ranks2, task, {0: (7, "end")})
    if model == "norm":  # a mean over a rank that sends zeros would halve it
        assert ranks[0].states[0]["1.running_var"].min() > 0.3
        steps = sum(map(len, ranks[1].steps))
        assert ranks[0].states[-1]["1.num_batches_tracked"] == steps


def test_gradients_that_travel_encoded(ranks3: RankPool) -> None:
    task = task_of(dtype="float32", options={"codec": "int8"}, optimizer="sgd")
    places = {0: (5, "end"), 2: (6, "begin")}
    ranks = left(ranks3, task, places)
    assert 1e-6 < difference(ranks[0].states[-1], alone(task, ranks)) <= 0.02


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
