"""Trains until the test kills rank 1: policy, way of the sums, which sum, folder.

Rank 1 writes its process ID before the sum, and waits there for its end. Rank 0 writes
each sum that it has begun, and whether the devices' own backend forms it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled.sitecustomize  # noqa: F401 - starts faster
from elche.comm.transport.process_group import Group
from elche.runtime.run import Run
from elche.session.process import current_run
from tests import device as test_device

SAMPLES, BATCH, EPOCHS = 256, 16, 3
LEAST_ELEMENTS = 600
"""Sums of the model's parameters have more."""
KILLED_WITHIN_S = 120.0


class Counting(nn.Module):
    """Counts how often each sample was trained, in a buffer that windows sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.register_buffer("seen", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        self.seen.index_add_(0, index, torch.ones_like(index))
        out: torch.Tensor = self.layers(x)
        return out


def main(policy: Any, way: str, at: str, folder: str) -> None:
    test_device.register()
    if way == "host":
        del dist.Backend.default_device_backend_map[test_device.NAME]
    torch.manual_seed(0)
    model = Counting()
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.arange(SAMPLES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, batches = elche.setup(
        model, optimizer, loader, policy=policy, epochs=EPOCHS
    )
    watch_sums(int(at), Path(folder))
    handed: list[list[int]] = []
    trained = Path(folder, f"trained{elche.rank()}")
    for _ in range(EPOCHS):
        handed.append([])
        for x, index in batches:
            (model(x, index) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handed[-1] += index.tolist()
            trained.write_text(json.dumps(handed))
    run = current_run()
    assert isinstance(run, Run)
    found = {
        "progress": elche.progress_samples(),
        "seen": model.seen.tolist(),
        "transport": run.worker.group.transport,
        "is_finite": all(bool(each.isfinite().all()) for each in model.parameters()),
    }
    Path(folder, f"rank{elche.rank()}.json").write_text(json.dumps(found))


def watch_sums(at: int, folder: Path) -> None:
    """Reports this rank's sums of the model; rank 1 waits before the given one."""
    sum_of, rank, count = Group.all_reduce_async, elche.rank(), 0

    def watched(group: Group, tensor: torch.Tensor) -> Any:
        nonlocal count
        count += tensor.numel() > LEAST_ELEMENTS
        if count == at and rank == 1:
            Path(folder, "waits").write_text(str(os.getpid()))
            threading.Event().wait(KILLED_WITHIN_S)
        work = sum_of(group, tensor)
        if tensor.numel() > LEAST_ELEMENTS and rank == 0:
            is_own = group.devices is not None and tensor.device.type != "cpu"
            Path(folder, "begun").write_text(f"{count} {'own' if is_own else 'host'}")
        return work

    Group.all_reduce_async = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
