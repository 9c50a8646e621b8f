"""What a loop calls on one device: rates by progress, `print`, `gather` and `any`."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ConfigError
from elche.monitor.progress import TaskProgress
from elche.session import output, progress

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


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def loader_of(batch_size: int = 4, *, drop_last: bool = False) -> DataLoader[object]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = TensorDataset(torch.arange(10.0)[:, None])
    loader: DataLoader[object] = DataLoader(data, batch_size, drop_last=drop_last)
    return elche.setup(model, optimizer, loader)[2]


def test_one_device_gathers_its_own_rows() -> None:
    rows = torch.ones(2, 3, requires_grad=True)
    got = elche.gather(Pair(rows, torch.tensor(3)))
    assert isinstance(got, Pair)
    assert torch.equal(got.one, rows)
    assert not got.one.requires_grad
    assert got.other.tolist() == [3]
    assert elche.any(torch.tensor(True))
    assert not elche.any(False)
    with pytest.raises(ConfigError, match=r"expected a tensor of rows.* got float"):
        elche.gather([0.5])


def test_several_ranks_need_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"elche\.any\(\) needs a run: call elche\.s"):
        elche.any(False)


def test_progress_counts_samples_of_a_run_and_items_of_anything_else(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(output, "TaskProgress", lambda: TaskProgress(interval_s=0.0))
    with caplog.at_level(logging.INFO):
        for _ in elche.progress(iter("ab"), desc="letters"):
            elche.print("seen")
        for _ in elche.progress(loader_of(5)):
            pass
        for _ in elche.progress(loader_of(drop_last=True), desc="whole batches"):
            pass
        assert list(elche.progress([1], disable=True)) == [1]
    said = [record.getMessage().partition(" after")[0] for record in caplog.records]
    assert said == [
        *("letters: started", "letters: 0", "letters: 1", "letters: 2"),
        "letters: finished",
        *("training: started", "training: 0 %", "training: 50 %", "training: 100 %"),
        "training: finished",
        *("whole batches: started", "whole batches: 0 %", "whole batches: 50 %"),
        *("whole batches: 100 %", "whole batches: finished"),
    ]
    assert capsys.readouterr().out == "seen\nseen\n"
