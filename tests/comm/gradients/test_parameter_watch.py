"""A change of what a model trains is noticed, whatever changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from elche.comm.gradients.gradient_hooks import ParameterWatch


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


def test_training_changes_nothing() -> None:
    watched = model()
    watch = ParameterWatch(watched)
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    watched(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    watched.load_state_dict(model().state_dict())
    watched.eval()
    assert watch.is_same


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].bias.requires_grad_(False),
        lambda m: m[1][0].register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda m: setattr(m[1][1], "bias", nn.Parameter(torch.zeros(2))),
        lambda m: m[1].__setitem__(1, nn.Linear(4, 2)),
    ],
    ids=["frozen", "parameter", "replaced", "exchanged"],
)
def test_every_change_is_noticed(change: Callable[[nn.Sequential], object]) -> None:
    watched = model()
    watch = ParameterWatch(watched)
    change(watched)
    assert not watch.is_same
