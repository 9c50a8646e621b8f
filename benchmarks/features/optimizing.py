"""Features of a step: losses, gradients and optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.features.feature import (
    EPOCHS,
    Seen,
    Trained,
    adamw,
    batches_of,
    feature,
    network,
    trained,
    usual,
)


@feature()
def plain_loop(elche: Any) -> Trained:
    """AdamW; the last batch is smaller."""
    model = network()
    return trained(elche, model, adamw(model), batches_of())


@feature(
    "R",
    why="amplifies rounding; with tolerance_change=0, without a line search; windows:"
    " its history begins anew at each average, but where a rank trains alone",
)
def lbfgs(elche: Any) -> Trained:
    """LBFGS with its closure."""
    model, loader, seen = network(), batches_of(batch_size=64), Seen()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.2, max_iter=4, tolerance_change=0.0
    )
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            seen(optimizer.step(closure), len(x))
    return Trained(model, optimizer, seen)


@feature(why="windows: over local steps")
def accumulation(elche: Any) -> Trained:
    """Gradients accumulated over four batches."""
    model, optimizer, loader, seen = usual(elche)
    for _epoch in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            (loss / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            seen(loss, len(x))
    return Trained(model, optimizer, seen)


@feature(why="of the whole batch's gradient; windows: of a local step's")
def clip_norm(elche: Any) -> Trained:
    """`clip_grad_norm_`."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            seen(loss, len(x))
    return Trained(model, optimizer, seen)


@feature("R", why="each share's gradients are rounded before they are summed")
def bf16(elche: Any) -> Trained:
    """Autocast to bfloat16."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            seen(loss, len(x))
    return Trained(model, optimizer, seen)


@feature("R", why="a scale at which steps overflow skips others on shares")
def grad_scaler(elche: Any) -> Trained:
    """Autocast to float16, GradScaler, unscaled for clipping."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(elche.device().type, init_scale=2.0**10)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(x.device.type, dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen(loss, len(x))
    return Trained(model, optimizer, seen)


@feature("D parameters", why="a hook sees the gradient of a rank's own samples")
def gradient_hook(elche: Any) -> Trained:
    """Gradients clamped by `register_hook`."""
    model, loader = network().to(elche.device()), batches_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return trained(elche, model, optimizer, loader)


@feature()
def gradient_penalty(elche: Any) -> Trained:
    """Gradient penalty: double backward."""
    model, optimizer, loader, seen = usual(elche)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            logits = model(x.requires_grad_())
            (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
            loss = F.cross_entropy(logits, y) + (slope.norm(dim=1) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen(loss, len(x))
    return Trained(model, optimizer, seen)


@feature(why="windows: a local sum counts for its whole batch")
def sum_loss(elche: Any) -> Trained:
    """A loss that is a sum, said with `loss_reduction="sum"`."""
    return _summed(elche, loss_reduction="sum")


@feature("N the loss is a sum", "N the loss is a sum", "the error names the option")
def sum_loss_unsaid(elche: Any) -> Trained:
    """A loss that is a sum, not said."""
    return _summed(elche)


def _summed(elche: Any, **options: Any) -> Trained:
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **options)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen(loss / len(x), len(x))
    return Trained(model, optimizer, seen)
