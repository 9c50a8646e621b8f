"""Learning rate schedules, per batch and per epoch."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler

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


@feature(why="handed over: `schedulers=[scheduler]`")
def one_cycle(elche: Any) -> Trained:
    """OneCycleLR, per batch."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = adamw(model)
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, epochs=EPOCHS, steps_per_epoch=len(loader)
    )
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, schedulers=[scheduler]
    )
    return _per_batch(model, optimizer, loader, scheduler, seen)


@feature(why="handed over: `schedulers=[scheduler]`")
def cosine(elche: Any) -> Trained:
    """CosineAnnealingLR, per batch."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = adamw(model)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, schedulers=[scheduler]
    )
    return _per_batch(model, optimizer, loader, scheduler, seen)


@feature(why="handed over: `schedulers=[scheduler]`")
def warmup(elche: Any) -> Trained:
    """LambdaLR that warms up, per batch."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = adamw(model)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 30))
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, schedulers=[scheduler]
    )
    return _per_batch(model, optimizer, loader, scheduler, seen)


@feature(why="handed over: `schedulers=[scheduler]`")
def sequential(elche: Any) -> Trained:
    """SequentialLR: linear, then cosine, per batch."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = adamw(model)
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10),
        lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader) - 10),
    ]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[10])
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, schedulers=[scheduler]
    )
    return _per_batch(model, optimizer, loader, scheduler, seen)


def _per_batch(
    model: Any, optimizer: Any, loader: Any, scheduler: Any, seen: Seen
) -> Trained:
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
