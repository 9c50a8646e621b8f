"""Learning rate schedules, per batch and per epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from benchmarks.features.feature import (
    EPOCHS,
    Seen,
    Trained,
    adamw,
    batches_of,
    feature,
    labelled,
    loss_over,
    network,
    step,
)

HANDED_OVER = "handed over: `schedulers=[scheduler]`"


@feature(why=HANDED_OVER)
def one_cycle(elche: Any) -> Trained:
    """OneCycleLR, per batch."""

    def made(optimizer: Optimizer, batches: int) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=batches)

    return _per_batch(elche, made)


@feature(why=HANDED_OVER)
def cosine(elche: Any) -> Trained:
    """CosineAnnealingLR, per batch."""
    return _per_batch(elche, lr_scheduler.CosineAnnealingLR)


@feature(why=HANDED_OVER)
def warmup(elche: Any) -> Trained:
    """LambdaLR that warms up, per batch."""

    def made(optimizer: Optimizer, _batches: int) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 30))

    return _per_batch(elche, made)


@feature(why=HANDED_OVER)
def sequential(elche: Any) -> Trained:
    """SequentialLR: linear, then cosine, per batch."""

    def made(optimizer: Optimizer, batches: int) -> lr_scheduler.LRScheduler:
        linear = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, batches - 10)
        return lr_scheduler.SequentialLR(optimizer, [linear, cosine], milestones=[10])

    return _per_batch(elche, made)


def _per_batch(
    elche: Any, scheduler_of: Callable[[Optimizer, int], lr_scheduler.LRScheduler]
) -> Trained:
    """Trains with a scheduler of the optimizer and the number of batches."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = adamw(model)
    scheduler = scheduler_of(optimizer, EPOCHS * len(loader))
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, schedulers=[scheduler]
    )
    for _epoch in range(EPOCHS):
        for x, y in loader:
            step(model, optimizer, x, y, seen)
            scheduler.step()
    return Trained(model, optimizer, seen)


@feature()
def step_lr(elche: Any) -> Trained:
    """StepLR, per epoch."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = adamw(model)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            step(model, optimizer, x, y, seen)
        scheduler.step()
    return Trained(model, optimizer, seen)


@feature(windows="L lr", why="the loss decides, the same on all ranks")
def plateau(elche: Any) -> Trained:
    """ReduceLROnPlateau by the loss over a second loader."""
    model, loader, seen = network(), batches_of(), Seen()
    held_out = batches_of(labelled(300), batch_size=100, shuffle=False)
    optimizer = adamw(model, lr=0.03)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _epoch in range(2 * EPOCHS):
        for x, y in loader:
            step(model, optimizer, x, y, seen)
        scheduler.step(loss_over(model, held_out))
    return Trained(model, optimizer, seen)
