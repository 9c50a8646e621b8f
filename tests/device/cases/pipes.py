"""Pipeline on this run's devices beside the CPU: schedule, costs, folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elche
import tests.harness.uncompiled.sitecustomize  # noqa: F401 - starts faster
from tests import device as test_device

STEPS = 4


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    inner = [each for _ in range(3) for each in (nn.Linear(16, 16), nn.Tanh())]
    return [nn.Linear(8, 16), *inner, nn.Linear(16, 1)]


def main(schedule: str, costs: Any, folder: str) -> None:
    test_device.register()
    plain = nn.Sequential(*layers())
    torch.manual_seed(1)
    batches = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(STEPS)]
    expected = []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(plain(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = []
    measured = {"costs": costs, "sample": batches[0][0][:4]} if costs else {}
    with elche.pipeline.Pipeline(
        layers(), loss_of, micro_batches=4, schedule=schedule, **measured
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for x, y in batches:
            pipe.zero_grad()
            found.append(float(pipe.step(x, y).loss))
            optimizer.step()
        devices = [str(each.device) for each in pipe.parameters()]
    said = {"found": found, "expected": expected, "devices": devices}
    Path(folder, f"rank{elche.rank()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
