"""DDP of elche, and torch's own, over the test device's default group."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import elche
from elche.devices.backends import own_backend
from tests import device as test_device

WRAPPERS: dict[str, Any] = {
    "elche": elche.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}


def take_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    with torch.no_grad():
        for each in model.parameters():
            assert each.grad is not None
            each.sub_(each.grad, alpha=0.1)


def main(kind: str, folder: str) -> None:
    device = test_device.register()
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(own_backend(device))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    wrap = WRAPPERS[kind]
    model = wrap(copy.deepcopy(plain).to(device.type))
    torch.manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(16, 8), torch.randn(16, 1)
        take_step(plain, x, y)
        part = [each.chunk(2)[rank].to(device.type) for each in (x, y)]
        take_step(model, *part)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    difference = max(float((a.cpu() - b).detach().abs().max()) for a, b in pairs)
    said = {"difference": difference}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
