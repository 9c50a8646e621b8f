"""Loops: how they begin, step, break off and go on."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

from benchmarks.features.feature import (
    EPOCHS,
    Seen,
    Trained,
    adamw,
    batches_of,
    epochs_of,
    feature,
    labelled,
    loss_over,
    network,
    step,
    usual,
)

STEPS = 40
HELD_OUT = slice(245, None)


def endless(loader: Any) -> Iterator[Any]:
    """Epochs without end."""
    while True:
        yield from loader


@feature(windows="L lr samples", why="the loss decides; all ranks stop at one epoch")
def early_stop(elche: Any) -> Trained:
    """Early stop by the loss over a second loader."""
    model, optimizer, loader, seen = usual(elche, lr=0.1)
    held_out = labelled(400)[HELD_OUT]
    best, bad = float("inf"), 0
    for _epoch in range(4 * EPOCHS):
        for x, y in loader:
            step(model, optimizer, x, y, seen)
        now = loss_over(model, [held_out]).item()
        bad = 0 if now < 0.95 * best else bad + 1
        best = min(best, now)
        if bad == 2:
            break
    return Trained(model, optimizer, seen)


@feature(windows="D samples", why="under windows each rank counts its own batches")
def break_off(elche: Any) -> Trained:
    """`break` after ten batches of each epoch."""
    model, optimizer, loader, seen = usual(elche)
    for _epoch in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            if i == 10:
                break
            step(model, optimizer, x, y, seen)
    return Trained(model, optimizer, seen)


@feature(windows="N", why="StopIteration; what ends the run says what to write")
def next_iter(elche: Any) -> Trained:
    """`next(iter(loader))`, `len(loader)` times in each epoch."""
    model, optimizer, loader, seen = usual(elche)
    for _epoch in range(EPOCHS):
        batches = iter(loader)
        for _step in range(len(loader)):
            x, y = next(batches)
            step(model, optimizer, x, y, seen)
    return Trained(model, optimizer, seen)


@feature(windows="N loader.steps(", why="the error names `loader.steps(n)`")
def endless_iterator(elche: Any) -> Trained:
    """Counted steps over an endless iterator."""
    model, optimizer, loader, seen = usual(elche)
    batches = endless(loader)
    for _step in range(STEPS):
        x, y = next(batches)
        step(model, optimizer, x, y, seen)
    return Trained(model, optimizer, seen)


@feature(why="the run's steps, on all ranks together")
def counted_steps(elche: Any) -> Trained:
    """Counted steps by `loader.steps(n)`."""
    model, optimizer, loader, seen = usual(elche)
    is_plain = not hasattr(loader, "steps")
    for x, y in islice(endless(loader), STEPS) if is_plain else loader.steps(STEPS):
        step(model, optimizer, x, y, seen)
    return Trained(model, optimizer, seen)


@feature(windows="D samples", why="under windows each rank counts its own batches")
def skipping(elche: Any) -> Trained:
    """`continue` at every fourth batch."""
    model, optimizer, loader, seen = usual(elche)
    for _epoch in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            if i % 4 == 3:
                continue
            step(model, optimizer, x, y, seen)
    return Trained(model, optimizer, seen)


@feature(
    windows="N swap the two lines",
    why="the error says so; also before forward, an epoch's last batch, groups fetched "
    "first",
)
def fetch_ahead(elche: Any) -> Trained:
    """The next batch fetched before backward."""
    model, optimizer, loader, seen = usual(elche)
    batches = endless(loader)
    x, y = next(batches)
    for _step in range(STEPS):
        loss = F.cross_entropy(model(x), y)
        seen(loss, len(x))
        x, y = next(batches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Trained(model, optimizer, seen)


@feature(why="opens an epoch and leaves it; its batch is no step")
def peek(elche: Any) -> Trained:
    """The first batch looked at before the loop."""
    model, optimizer, loader, seen = usual(elche)
    x, _ = next(iter(loader))
    assert model(x).shape[1] == 4
    epochs_of(model, optimizer, loader, seen)
    return Trained(model, optimizer, seen)


@feature()
def restore(elche: Any) -> Trained:
    """Checkpoint after an epoch, restored into new objects."""
    checkpoint, seen = io.BytesIO(), Seen()
    for first, last in ((0, 1), (1, EPOCHS)):
        model, loader = network(), batches_of()
        optimizer = adamw(model)
        if first:
            checkpoint.seek(0)
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        model, optimizer, loader = elche.setup(model, optimizer, loader)
        for _epoch in range(first, last):
            for x, y in loader:
                step(model, optimizer, x, y, seen)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, checkpoint)
    return Trained(model, optimizer, seen)


@feature(why="the bar's total is the run's; under windows a rank fills its part")
def progress_bar(elche: Any) -> Trained:
    """A progress bar around the loader (rich, tqdm)."""
    model, optimizer, loader, seen = usual(elche)
    console = Console(file=io.StringIO())
    for epoch in range(EPOCHS):
        for x, y in track(loader, f"epoch {epoch}", console=console):
            step(model, optimizer, x, y, seen)
    return Trained(model, optimizer, seen)


@feature()
def evaluation(elche: Any) -> Trained:
    """Evaluation under `no_grad` inside the epoch."""
    model, optimizer, loader, seen = usual(elche)
    held_out = labelled(400)[HELD_OUT]
    for _epoch in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            step(model, optimizer, x, y, seen)
            if i % 5 == 0:
                model.eval()
                assert loss_over(model, [held_out]).isfinite()
                model.train()
    return Trained(model, optimizer, seen)
