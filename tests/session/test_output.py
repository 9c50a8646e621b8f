"""`elche.print`, `progress`, `gather` and `any` on one device."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ConfigError
from elche.monitor.progress import TaskProgress
from elche.session import output

pytestmark = pytest.mark.usefixtures("plain_environment")


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
