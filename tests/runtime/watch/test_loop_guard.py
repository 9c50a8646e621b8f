"""What a loop may not do between the common steps of gradient windows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elche.errors import ConfigError
from elche.runtime.watch.loop_guard import LoopGuard
from elche.torch_internals.groups import SCALER_FLAG


def guarded(*, fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD([model.weight], lr=0.1, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_refused_until_the_guard_is_gone(fused: bool) -> None:
    model, optimizer = guarded(fused=fused)
    before = vars(optimizer).get(SCALER_FLAG)
    guard = LoopGuard(optimizer, list(model.parameters()))
    guard.attach()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(ConfigError, match="a GradScaler cannot step where gradients"):
        scaler.step(optimizer)
    guard.detach()
    guard.detach()
    assert vars(optimizer).get(SCALER_FLAG) is before
    scaler.step(optimizer)


def test_a_scaler_that_is_switched_off_may_stay() -> None:
    model, optimizer = guarded()
    guard = LoopGuard(optimizer, list(model.parameters()))
    guard.attach()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    guard.detach()


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, optimizer = guarded()
    guard = LoopGuard(optimizer, list(model.parameters()))
    second = torch.optim.AdamW([model.bias])
    with pytest.raises(ConfigError, match=r"\(AdamW\) steps 1 of the model's param"):
        guard.refuse_other(second)
    guard.refuse_other(torch.optim.AdamW(nn.Linear(2, 2).parameters()))  # another model
    guard.refuse_other(torch.optim.SGD([model.weight], lr=0.1))  # inside a wrapper
    guard.refuse_other(optimizer)
