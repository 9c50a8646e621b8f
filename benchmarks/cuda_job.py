"""The job of `cuda_paths.py`: a convolutional network on made-up images, plain loop.

Prints one line of JSON on rank 0: samples per second, losses, what ranks did.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche


def network(width: int) -> nn.Sequential:
    """A small residual-free network with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--codec", default="fp32")
    options = parser.parse_args()
    torch.manual_seed(0)
    images = torch.randn(options.samples, 3, 32, 32)
    labels = images.mean((2, 3)).argmax(1) + 3 * (images[:, 0, 0, 0] > 0).long()
    loader = DataLoader(
        TensorDataset(images, labels),
        batch_size=64,
        shuffle=True,
        num_workers=options.workers,
        pin_memory=torch.accelerator.is_available(),
        persistent_workers=options.workers > 0,
    )
    model = network(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, codec=options.codec
    )
    kind = elche.device().type
    scaler = torch.amp.GradScaler(kind, enabled=options.amp and kind != "cpu")
    losses, rates = [], []
    for _ in range(options.epochs):
        started_s, total, count = time.perf_counter(), torch.zeros(()), 0
        for x, y in loader:
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=options.amp):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            total, count = total + loss.detach().cpu(), count + 1
        losses.append(float(total) / max(1, count))
        rates.append(options.samples / (time.perf_counter() - started_s))
    elche.barrier()
    if elche.is_main_process():
        print(json.dumps({"samples_per_s": rates, "loss": losses}))


if __name__ == "__main__":
    main()
