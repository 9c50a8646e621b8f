"""A rank that only slows steps down is left out of them, and comes back."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elche
from elche.coordination.auto import windows_advice
from elche.coordination.auto.first_choice import MOST_STEPS
from elche.coordination.protocol.events import StepsDone
from elche.coordination.sync import left_out, step_grants
from elche.coordination.sync.left_out import ExcludedRanks
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.session.process import current_run
from tests.distributed.cases.tasks import (
    Task,
    build,
    difference,
    error_of,
    identical,
    take_step,
)
from tests.harness.choices import wanted as wanted
from tests.harness.rank_pool import RankPool
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

STEPS, BATCH = 40, 12
SLOW, SLOW_S, SLOW_EPOCHS, EPOCHS = 1, 0.1, 2, 4
SAMPLE_S = 0.001
ADVICE = "policy='async' is predicted to win"
"""What a run that names no policy is told, once."""
FAST_FROM = 0
"""The slow rank is fast where fewer steps of an epoch are left."""


@dataclass
class Found:
    """What a rank trained on and holds."""

    steps: list[list[list[int]]] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    left_with: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""


def train(task: Task, kind: str = "") -> Found:
    """Trains for some epochs; ``kind`` says what else is done."""
    found = Found()
    found.error = error_of(_train, found, task, kind)
    return found


def _train(found: Found, task: Task, kind: str) -> None:
    model, optimizer, loader = build(task)
    options: dict[str, Any] = {"timeout_s": 100.0, **task.options}
    by_hand = kind == "rate"
    average = averaged(model)
    scheduler = RateByHand(optimizer) if by_hand else scheduled(optimizer)
    model, optimizer, loader = elche.setup(
        *(model, optimizer, loader),
        epochs=EPOCHS,
        copies=[average],
        schedulers=[] if by_hand else [scheduler],
        **nested(options),
    )
    run = current_run()
    assert run is not None
    run.notifications.emit = found.lines.append
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    for epoch in range(EPOCHS):
        steps: list[list[int]] = []
        for x, y, index, _ in loader:
            if kind == "scaler":
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if epoch == 2 and elche.rank() != SLOW:
                    found.left_with = held(model)
                    break
            else:
                take_step(model, optimizer, x, y)
                average.update_parameters(model)
                scheduler.step()
            done = round(elche.progress_samples()) // BATCH - epoch * STEPS
            steps += [[]] * (done - len(steps))  # those that it was left out of
            steps.append(index.tolist() if run.current_samples else [])
            leaves = kind == "break" and elche.rank() == 2 and epoch == 1
            if leaves and len(steps) == STEPS // 2:
                break
            if kind == "long" and epoch == 1:
                if elche.rank() == SLOW:
                    run.worker.timeout_s = 3.0  # where it waits for grants
                time.sleep(0.12)
        run.worker.timeout_s = 100.0
        found.steps.append(steps)
        found.progress.append(elche.progress_samples())
        found.states.append(held(model, average))


def averaged(model: torch.nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def scheduled(optimizer: torch.optim.Optimizer) -> MultiStepLR:
    """Its state is of no kind that JSON holds, but what moves in it is."""
    return MultiStepLR(optimizer, range(5, 200, 7), gamma=0.95)


class RateByHand:
    """A loop's own rule for the rate, by its own count of steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._steps = optimizer, 0
        self._rate = float(optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        self._steps += 1
        rate = self._rate / (1.0 + self._steps / 20.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate


def held(*modules: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{at} {name}": value.detach().clone()
        for at, module in enumerate(modules)
        for name, value in module.state_dict().items()
    }


def alone(task: Task, ranks: list[Found], kind: str = "") -> dict[str, torch.Tensor]:
    """One process trains on what they have trained on, step by step."""
    model, optimizer, loader = build(task)
    average = averaged(model)
    scheduler = RateByHand(optimizer) if kind == "rate" else scheduled(optimizer)
    data: Any = loader.dataset
    for epoch in range(EPOCHS):
        for number in range(len(ranks[0].steps[epoch])):
            parts = [r.steps[epoch][number : number + 1] for r in ranks]
            index = [one for part in parts for each in part for one in each]
            F.cross_entropy(model(data.x[index]), data.y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            scheduler.step()
    return held(model, average)


def task_of(**changes: Any) -> Task:
    kept = {"samples": STEPS * BATCH, "batch_size": BATCH, "dtype": "float64"}
    return Task(**{**kept, "optimizer": "adamw", **changes})


@pytest.fixture(autouse=True)
def decided_by_given_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks train as fast as they do; the core, which is here, takes other times.

    It decides after a few steps, and tries ranks again in every epoch.
    """
    take = SyncPolicy._take

    def timed(policy: SyncPolicy, event: StepsDone) -> None:
        is_slow = event.rank == SLOW and event.epoch < SLOW_EPOCHS
        is_slow = is_slow and policy.grants.ungranted >= FAST_FROM
        steps = event.stop - event.start
        busy_s = SAMPLE_S * event.samples + SLOW_S * steps * is_slow
        take(policy, replace(event, busy_s=busy_s, sync_wait_s=0.0, warm=True))

    monkeypatch.setattr(SyncPolicy, "_take", timed)
    monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)
    monkeypatch.setattr(left_out, "SETTLING_GRANTS", 2)
    monkeypatch.setattr(left_out, "MEASURED_S", 0.0)
    monkeypatch.setattr(left_out, "CARRYING_S", 0.0)
    monkeypatch.setattr(left_out, "TRIAL_COST", math.inf)
    monkeypatch.setattr(ExcludedRanks, "is_trial_due", False)  # inside of epochs
    monkeypatch.setattr(windows_advice, "ADVICE_GRANTS", 1)
    monkeypatch.setattr(windows_advice, "advice", lambda cluster: ADVICE)


def check(ranks: list[Found], task: Task, kind: str = "") -> None:
    """All hold what one process does that trains on the same, at every epoch's end."""
    assert [rank.error for rank in ranks] == [""] * len(ranks)
    for epoch in range(EPOCHS):
        assert identical([rank.states[epoch] for rank in ranks])
    assert [rank.progress for rank in ranks] == [ranks[0].progress] * len(ranks)
    assert difference(alone(task, ranks, kind), ranks[0].states[-1]) < 1e-9


def check_whole(ranks: list[Found]) -> None:
    """Every sample is trained on once in each epoch."""
    for epoch in range(EPOCHS):
        seen = [one for r in ranks for step in r.steps[epoch] for one in step]
        assert sorted(seen) == list(range(STEPS * BATCH))


def sizes(found: Found) -> list[int]:
    return [len(steps) for steps in found.steps]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.every(2)
def test_a_slow_rank_is_left_out_and_comes_back(
    ranks3: RankPool, transport: str
) -> None:
    task = task_of(options={"transport": transport})
    ranks = ranks3.serve(train, task)
    check(ranks, task)
    check_whole(ranks)
    assert sizes(ranks[0]) == sizes(ranks[2]) == [STEPS] * EPOCHS
    first, second, *later = sizes(ranks[SLOW])
    assert STEPS > first > second > 1
    assert later == [STEPS, STEPS]
    advice = [[line for line in rank.lines if ADVICE in line] for rank in ranks]
    assert advice == [[f"elche: {ADVICE}"], [], []]
    lines = [line for line in ranks[0].lines if ADVICE not in line]
    said = [line.partition(":")[2] for line in lines]
    assert said[0].startswith(" rank 1 excluded: steps of")
    assert said[1].startswith(" rank 1 takes part again")


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.every(2)
def test_a_slow_rank_leaves_for_good_where_the_rate_is_set_by_hand(
    ranks3: RankPool, transport: str
) -> None:
    """Its own rate is behind: its part of later first steps is empty."""
    task = task_of(options={"transport": transport})
    ranks = ranks3.serve(train, task, kind="rate")
    check(ranks, task, "rate")
    assert sizes(ranks[0]) == sizes(ranks[2]) == [STEPS] * EPOCHS
    first, *later = sizes(ranks[SLOW])
    assert STEPS > first > 1
    assert [steps for epoch in ranks[SLOW].steps[1:] for steps in epoch] == [[]] * 3
    assert later == [1, 1, 1]
    check_whole(ranks)
    lines = [line for line in ranks[0].lines if "rank 1" in line]
    assert len(lines) == 1
    assert "because the learning rate changes inside an epoch" in lines[0]


def test_a_rank_returns_within_the_epoch_where_all_state_is_copied(
    ranks3: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch is cut for a trial, after half of its steps."""

    def is_due(ranks: ExcludedRanks) -> bool:
        return bool(ranks.ranks) and ranks._steps_left < STEPS // 2

    monkeypatch.setattr(ExcludedRanks, "is_trial_due", property(is_due))
    monkeypatch.setattr(sys.modules[__name__], "FAST_FROM", STEPS // 2)
    task = task_of()
    ranks = ranks3.serve(train, task)
    check(ranks, task)
    assert [] in ranks[SLOW].steps[0]
    assert [] not in ranks[SLOW].steps[0][-4:]
    check_whole(ranks)


def test_auto_leaves_out_at_once_whom_its_choice_does_without(
    ranks3: RankPool, wanted: Callable[..., None]
) -> None:
    wanted(("sync", (0, 2)))
    task = task_of(options={"policy": "auto"})
    ranks = ranks3.serve(train, task)
    check(ranks, task)
    assert sizes(ranks[0]) == sizes(ranks[2]) == [STEPS] * EPOCHS
    assert sizes(ranks[SLOW])[0] <= MOST_STEPS + 2
    assert sizes(ranks[SLOW])[-1] == STEPS


def test_a_rank_is_left_out_where_gradients_travel_encoded(ranks3: RankPool) -> None:
    """Residuals begin anew in every group; the ranks that are left stay equal."""
    options = {"codec": "int8", "policy": "sync"}
    task = task_of(dtype="float32", options=options, optimizer="sgd")
    ranks = ranks3.serve(train, task)
    assert [rank.error for rank in ranks] == [""] * 3
    assert not any(ADVICE in line for rank in ranks for line in rank.lines)
    assert sizes(ranks[SLOW])[1] < STEPS
    for epoch in range(EPOCHS):
        assert identical([rank.states[epoch] for rank in ranks])
    assert 1e-6 < difference(alone(task, ranks), ranks[0].states[-1]) <= 0.02


def test_a_loop_may_break_off_while_a_rank_is_left_out(ranks3: RankPool) -> None:
    """The one that goes on finishes what was granted; the third waits all the time."""
    task = task_of()
    ranks = ranks3.serve(train, task, kind="break")
    check(ranks, task)
    first, left_out_after, third = (sizes(rank)[1] for rank in ranks)
    assert left_out_after < third == STEPS // 2 <= first < STEPS


def test_a_rank_that_has_left_for_good_is_no_source_where_the_others_break_off(
    ranks3: RankPool,
) -> None:
    """Its loss scale is behind: once, all took the model of its own first step."""
    task = task_of(dtype="float32", optimizer="sgd")
    ranks = ranks3.serve(train, task, kind="scaler")
    assert [rank.error for rank in ranks] == [""] * 3
    assert len(sizes(ranks[SLOW])) == EPOCHS
    for name, value in ranks[0].left_with.items():
        assert [r for r in ranks if not r.states[2][name].equal(value)] == []


@pytest.mark.slow
def test_it_waits_longer_than_for_anything_else(ranks2: RankPool) -> None:
    task = task_of()
    check(ranks2.serve(train, task, kind="long"), task)
