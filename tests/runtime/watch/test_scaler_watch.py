"""Steps that a GradScaler skips, and scalers that have no gradients to work on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from elche.errors import ConfigError
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.watch.scaler_watch import NAME, ScalerWatch

BAD = (False, True, False, False, True, True)


def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    """A loop whose gradients overflow now and then; the weights after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = []
    for is_bad in BAD:
        loss = model(torch.ones(1, 2)).sum() * (float("inf") if is_bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(next(model.parameters()).detach().clone())
    return weights


def made(*, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_counted(fused: bool) -> None:
    """Of this optimizer, while it is watched; every step is what it was."""
    (model, optimizer), log = made(fused=fused), ScalarLog()
    expected = train(*reversed(made(fused=fused)))
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    watch.attach()
    copied, other = copy.deepcopy(optimizer), nn.Linear(2, 2)
    copied.param_groups[0]["params"] = list(other.parameters())
    train(copied, other)
    weights = train(optimizer, model)
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    assert log.drain(final=True) == ((NAME, 3.0, 6.0),)
    assert watch.has_scaler
    watch.detach()
    watch.detach()
    train(optimizer, model)
    assert log.drain(final=True) == ()


def test_without_a_scaler_nothing_is_logged() -> None:
    (model, optimizer), log = made(fused=True), ScalarLog()
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert log.drain(final=True) == ()
    assert not watch.has_scaler


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_refused_where_gradients_are_summed(fused: bool) -> None:
    model, optimizer = made(fused=fused)
    is_refused = [False, True]
    watch = ScalerWatch(optimizer, ScalarLog())
    watch.attach(is_refused.pop)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(ConfigError, match="a GradScaler cannot step where gradients"):
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert watch.has_scaler
