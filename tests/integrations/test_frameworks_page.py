"""The page on other frameworks: its blocks on Accelerate, and on functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import elche
from tests.integrations.programs import ROOT, printed

PAGE = ROOT / "docs" / "frameworks.md"


def blocks(heading: str) -> list[str]:
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def outcome_of(block: str, path: Path) -> dict[str, torch.Tensor]:
    """What a block saves, of a small model."""
    torch.manual_seed(0)
    x = torch.randn(48, 4)
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    shuffle = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=8, shuffle=True, generator=shuffle),
        "loss_fn": torch.nn.functional.mse_loss,
        "path": path,
    }
    exec(block, given)
    return torch.load(path, weights_only=True)


@pytest.mark.filterwarnings("ignore")
def test_accelerate_before_and_after(tmp_path: Path) -> None:
    before, after = blocks("For users of Accelerate")
    saved = [outcome_of(each, tmp_path / "model.pt") for each in (before, after)]
    elche.shutdown()
    assert saved[0].keys() == saved[1].keys()
    for name, value in saved[0].items():
        torch.testing.assert_close(value, saved[1][name], msg=name)
    lines = set(before.splitlines()), set(after.splitlines())
    calls = [line for line in lines[0] - lines[1] if "import" not in line]
    assert len(calls) == 6 == len(lines[1] - lines[0] - {"import elche"}) + 1


def test_a_function_on_every_rank(tmp_path: Path) -> None:
    (block,) = blocks("A function on every rank")
    script = tmp_path / "script.py"
    script.write_text(block)
    assert printed(str(script)) == "0.2\n"
