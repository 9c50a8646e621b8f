"""How far the host runs ahead of its device, in batches with no backward pass."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled.sitecustomize  # noqa: F401 - starts faster
from elche.runtime.process.worker import HOST_AHEAD_BATCHES
from tests import device as test_device

SAMPLES, BATCH, EVERY = 512, 16, 8


def main(policy: Any, folder: str) -> None:
    test_device.register()
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=BATCH)
    model, optimizer, batches = elche.setup(
        model, optimizer, loader, policy=policy, epochs=1
    )
    launched: list[torch.Event] = []
    late = 0
    for number, (x, y) in enumerate(batches):
        if number > HOST_AHEAD_BATCHES:
            late += not launched[-1 - HOST_AHEAD_BATCHES].query()
        loss = (model(x) - y).square().mean()
        if number % EVERY == 0:  # a reduction waits for the device
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        launched.append(torch.accelerator.current_stream().record_event())
    found = {"batches": len(launched), "late": late}
    Path(folder, f"rank{elche.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
