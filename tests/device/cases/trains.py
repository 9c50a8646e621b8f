"""Trains a small model on this rank's device: policy, whether times count, folder.

Where they count, a rank on the CPU takes a time per sample.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled.sitecustomize  # noqa: F401 - starts faster
from elche.config import DebugConfig
from elche.runtime.run import Run
from elche.session.process import current_run
from tests import device as test_device

SAMPLES, BATCH, EPOCHS = 512, 32, 3
CPU_SAMPLE_S = 0.01


def main(policy: Any, counts: str, folder: str) -> None:
    test_device.register()
    is_timed, is_cpu = counts == "timed", elche.device().type == "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    inputs = torch.randn(SAMPLES, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, batches = elche.setup(
        model,
        optimizer,
        loader,
        policy=policy,
        epochs=EPOCHS,
        debug=DebugConfig(deterministic=not is_timed and policy != "sync"),
    )
    samples = [0] * EPOCHS
    for epoch in range(EPOCHS):
        for x, y in batches:
            time.sleep(CPU_SAMPLE_S * len(x) * (is_timed and is_cpu))
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            samples[epoch] += len(x)
    run = current_run()
    transport = run.worker.group.transport if isinstance(run, Run) else "none"
    found = {
        "transport": transport,
        "samples": samples,
        "parameters": [
            each.detach().cpu().flatten().tolist() for each in model.parameters()
        ],
    }
    Path(folder, f"rank{elche.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
