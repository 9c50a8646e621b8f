"""Schedulers that were handed over, in a loop that a test drives."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.step_count import StepCount
from elche.errors import ConfigError
from elche.runtime.watch.followed_schedulers import FollowedSchedulers

BATCHES, BATCH = 12, 8
SIZES = BatchSizes(((BATCH, BATCHES - 1), (BATCH - 3, 1)))
EPOCHS = 3
TOTAL = BATCHES * EPOCHS


def optimizer_of() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


def _sequential(optimizer: torch.optim.Optimizer) -> torchs.LRScheduler:
    warmup = torchs.LinearLR(optimizer, 0.1, total_iters=5)
    rest = torchs.CosineAnnealingLR(optimizer, TOTAL - 5)
    return torchs.SequentialLR(optimizer, [warmup, rest], [5])


def _chained(optimizer: torch.optim.Optimizer) -> torchs.LRScheduler:
    warmup = torchs.LinearLR(optimizer, 0.1, total_iters=5)
    return torchs.ChainedScheduler([warmup, torchs.ExponentialLR(optimizer, 0.9)])


KINDS: dict[str, Callable[[torch.optim.Optimizer], torchs.LRScheduler]] = {
    "chained": _chained,
    "one cycle": lambda o: torchs.OneCycleLR(o, 0.2, total_steps=TOTAL),
    "restarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 5, 2),
    "sequential": _sequential,
}


def settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a schedule may have moved."""
    return {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


def state_of(scheduler: torchs.LRScheduler) -> str:
    """What a checkpoint would hold."""
    return str(scheduler.state_dict())


def followed(
    scheduler: torchs.LRScheduler, policy: str = "async"
) -> FollowedSchedulers:
    count = StepCount()
    schedulers = FollowedSchedulers(policy, lambda metric: metric + 1.0, count)
    schedulers.add(scheduler)
    return schedulers


def begin(schedulers: FollowedSchedulers, samples_before: int = 0) -> None:
    """An epoch begins."""
    schedulers._count.begin_epoch(SIZES)
    schedulers.begin_epoch(samples_before, schedulers.optimizers)


def end(schedulers: FollowedSchedulers, samples: int | None = None) -> None:
    """It has ended, early after so many samples."""
    is_early = samples is not None
    schedulers._count.end_epoch(samples or SIZES.num_samples, is_early=is_early)
    schedulers.end_epoch(has_ended=True)


def run_windows(
    schedulers: FollowedSchedulers, batches: int, steps: int = 0, every: int = 1
) -> None:
    """An epoch of which this rank has so many batches, some of them as steps."""
    (scheduler,) = schedulers.schedulers
    begin(schedulers)
    for at in range(batches):
        if at == steps:
            schedulers.begin_windows()
        done = at if at < steps else steps + (at - steps) * BATCHES / batches
        if at >= steps:
            schedulers.advance(done * BATCH)
        scheduler.optimizer.step()
        if (at + 1) % every == 0:
            scheduler.step()
        schedulers.rates.check(schedulers.optimizers)
        schedulers.batch_done()
    end(schedulers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", [5, 30], ids=["slow rank", "fast rank"])
def test_a_run_ends_where_one_device_ends(kind: str, batches: int) -> None:
    """Steps, then windows in the same epoch, then windows, then steps."""
    plain, ours = KINDS[kind](optimizer_of()), KINDS[kind](optimizer_of())
    schedulers = followed(ours, "auto")
    places = [(batches, 2), (batches, 0), (BATCHES, BATCHES)]
    for count, steps in places:
        run_windows(schedulers, count, steps)
        for _ in range(BATCHES):
            plain.optimizer.step()
            plain.step()
        assert settings(ours.optimizer) == settings(plain.optimizer)
        assert state_of(ours) == state_of(plain)


def test_rates_move_with_progress_and_never_back() -> None:
    scheduler = torchs.StepLR(optimizer_of(), 1, 0.5)
    schedulers = followed(scheduler)
    begin(schedulers, 1000)
    schedulers.begin_windows()
    seen = []
    for samples in (0, 3 * BATCH, 2 * BATCH, 5 * BATCH, 10_000):
        schedulers.advance(1000 + samples)
        seen.append(scheduler.last_epoch)
        scheduler.optimizer.step()
        scheduler.step()
        schedulers.batch_done()
    assert seen == [0, 3, 3, 5, BATCHES - 1]
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (BATCHES - 1)
    end(schedulers, 7 * BATCH)  # left early: the steps stay
    assert scheduler.last_epoch == BATCHES - 1


def test_a_rank_without_work_follows_what_others_have_shown() -> None:
    scheduler = torchs.StepLR(optimizer_of(), 1)
    schedulers = followed(scheduler)
    begin(schedulers)
    schedulers.begin_windows()
    assert schedulers.periods() == ((0, 0),)
    schedulers.agree((2,))
    end(schedulers)  # without torch's advice, which is an error here
    assert scheduler.last_epoch == BATCHES // 2


def test_an_epoch_that_is_broken_off_takes_no_steps() -> None:
    scheduler = torchs.StepLR(optimizer_of(), 1)
    schedulers = followed(scheduler)
    begin(schedulers)
    schedulers.begin_windows()
    scheduler.optimizer.step()
    scheduler.step()
    schedulers.end_epoch(has_ended=False)
    assert scheduler.last_epoch == 0


def test_a_schedule_ends_at_its_total() -> None:
    """Epochs more than planned: torch's own step would raise."""
    scheduler = torchs.OneCycleLR(optimizer_of(), 0.2, total_steps=BATCHES + 2)
    schedulers = followed(scheduler)
    for _ in range(3):
        run_windows(schedulers, 20)
    assert scheduler.last_epoch == BATCHES + 2


@pytest.mark.parametrize("named", [False, True])
def test_a_metric_is_the_mean_over_ranks(named: bool) -> None:
    scheduler = torchs.ReduceLROnPlateau(optimizer_of(), patience=0)
    followed(scheduler, "cadence")
    scheduler.step(metrics=1.0) if named else scheduler.step(torch.tensor(1.0))
    assert scheduler.best == 2.0


@pytest.mark.parametrize("in_windows", [False, True])
def test_what_counts_a_rank_is_refused(in_windows: bool) -> None:
    scheduler = torchs.StepLR(optimizer_of(), 1)
    schedulers = followed(scheduler, "auto")
    begin(schedulers)
    if in_windows:
        schedulers.begin_windows()
    with pytest.raises(ConfigError, match=r"\.step\(\) with an argument inside"):
        scheduler.step(3)
    scheduler.optimizer.step()
    scheduler.step()
    with pytest.raises(ConfigError, match=r"StepLR\.step\(\) twice in one batch"):
        scheduler.step()
    with pytest.raises(ConfigError, match="call it before the loop, on every rank"):
        schedulers.add(torchs.StepLR(optimizer_of(), 1))


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_scheduler_looks_as_before_and_is_given_back(policy: str) -> None:
    scheduler = torchs.OneCycleLR(optimizer_of(), 0.2, total_steps=TOTAL)
    kind, state = type(scheduler), copy.copy(scheduler.state_dict())
    schedulers = followed(scheduler, policy)
    schedulers.add(scheduler)
    assert schedulers.schedulers == [scheduler]
    assert (type(scheduler) is kind) == (policy == "sync")
    assert isinstance(scheduler, kind)
    assert type(scheduler).__name__ == "OneCycleLR"
    assert scheduler.state_dict() == state
    assert type(copy.deepcopy(scheduler)) is kind
    torch.save([scheduler, scheduler.state_dict()], io.BytesIO())
    schedulers.detach()
    assert type(scheduler) is kind
    scheduler.optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_another_schedule_of_the_same_optimizer_is_seen() -> None:
    """Although the rates move by the one that was handed over, too."""
    optimizer = optimizer_of()
    scheduler, other = torchs.StepLR(optimizer, 1, 0.5), torchs.StepLR(optimizer, 1)
    schedulers = followed(scheduler)
    begin(schedulers)
    schedulers.begin_windows()
    optimizer.step()
    scheduler.step()
    other.step()
    schedulers.batch_done()
    with pytest.raises(ConfigError, match=r"pass its scheduler \(elche\.setup"):
        schedulers.advance(BATCH)
