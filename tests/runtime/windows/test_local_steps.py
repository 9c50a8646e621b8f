"""Optimizers of a rank whose update is lost."""

from __future__ import annotations

import torch
from torch import nn

from elche.runtime.watch.optimizers_seen import OptimizersSeen
from elche.runtime.windows.local_steps import LocalSteps


def test_all_begin_anew() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    first = torch.optim.AdamW(model[0].parameters())
    second = torch.optim.Adafactor(model[1].parameters())
    seen = OptimizersSeen(model, [first])
    steps = LocalSteps(model, seen)
    seen.attach()
    model(torch.ones(4, 3)).sum().backward()
    for parameter in model[1].parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    for each in (first, second):
        each.step()
    seen.detach()
    assert steps.optimizers() == [first, second]
    assert second.state
    steps.forget_states()
    assert not first.state
    assert not second.state
