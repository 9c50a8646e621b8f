"""Learning rates follow global progress, whatever a rank's own steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ConfigError
from elche.session import progress

pytestmark = pytest.mark.usefixtures("plain_environment")


def sgd(lr: float | torch.Tensor = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=lr)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_it_follows_the_samples_of_the_run() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = DataLoader(TensorDataset(torch.ones(10, 2)), batch_size=4)
    _, _, loader = elche.setup(model, optimizer, data)
    schedule = elche.ProgressLR(optimizer, lambda progress: 1 - progress, 20)
    seen = []
    for _ in range(2):
        for _ in loader:
            schedule.step()
            seen += rates(optimizer)
    assert seen == pytest.approx([0.5, 0.4, 0.3, 0.25, 0.15, 0.05])
    schedule.step()
    assert rates(optimizer) == [0.0]


def test_progress_ends_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch more than planned, or a window planned beyond the end."""
    monkeypatch.setattr(progress, "progress_samples", lambda: 150.0)
    seen: list[float] = []

    def note(progress: float) -> float:
        seen.append(progress)
        return 1.0

    assert elche.ProgressLR(sgd(), note, 100, scale=3.0).step() == 3.0
    assert seen == [1.0]


def test_every_group_keeps_its_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "progress_samples", lambda: 50.0)
    optimizer = sgd()
    schedule = elche.ProgressLR(optimizer, lambda progress: progress, 100)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1})
    schedule.step()
    schedule.step()
    assert rates(optimizer) == [0.25, 0.05]


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    rate = torch.tensor(0.5)
    optimizer = sgd(rate)
    elche.ProgressLR(optimizer, lambda _: 0.5, 100).step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


@pytest.mark.parametrize("factor", [math.nan, math.inf, -0.1])
def test_a_factor_that_is_no_rate(factor: float) -> None:
    optimizer = sgd()
    schedule = elche.ProgressLR(optimizer, lambda _: factor, 100)
    with pytest.raises(ConfigError, match=r"factor at progress 0\.000 to be finite"):
        schedule.step()
    assert rates(optimizer) == [0.5]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"optimizer": 3}, r"expected a torch\.optim\.Optimizer, got 3"),
        ({"fn": 3}, "expected fn to be callable, got 3"),
        (
            {"total_samples": 0},
            "total_samples to be a positive finite number, got 0",
        ),
        ({"scale": 0.0}, r"expected scale to be a positive finite number, got 0\.0"),
        ({"scale": math.inf}, "expected scale to be a positive finite number, got inf"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], says: str) -> None:
    given = {"optimizer": sgd(), "fn": math.cos, "total_samples": 10} | change
    with pytest.raises(ConfigError, match=says):
        elche.ProgressLR(**given)
