"""Trains a small model on this rank's device, for launchers: policy, folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled  # noqa: F401 - starts faster
from tests import device as test_device

SAMPLES, BATCH, EPOCHS = 512, 32, 3


def main(policy: str, folder: str) -> None:
    test_device.register()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    inputs = torch.randn(SAMPLES, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    model.to(os.environ["ELCHE_DEVICE"])  # makes new parameters, for the optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, batches = elche.setup(
        model, optimizer, loader, policy=policy, epochs=EPOCHS
    )
    samples = 0
    for _ in range(EPOCHS):
        for x, y in batches:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            samples += len(x)
    with torch.no_grad():
        loss = nn.functional.mse_loss(
            model(inputs.to(elche.device())).cpu(), data[:][1]
        )
    found = {
        "samples": samples,
        "loss": loss.item(),
        "parameters": [
            each.detach().cpu().flatten().tolist() for each in model.parameters()
        ],
    }
    Path(folder, f"rank{elche.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
