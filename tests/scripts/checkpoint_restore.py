"""A run that is stopped after two epochs, and goes on from its checkpoint."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche

EPOCHS, STOP_AFTER = 4, 2
path = Path(sys.argv[1]) / "checkpoint"
# elche: path = path.with_suffix(f".{elche.rank()}")


def main():
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    # elche: model, optimizer, loader = elche.setup(model, optimizer, loader)

    start_epoch, last_epoch, samples = 0, STOP_AFTER, 0
    if path.exists():
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["rng"])
        start_epoch, samples = checkpoint["epoch"] + 1, checkpoint["samples"]
        last_epoch = EPOCHS

    for epoch in range(start_epoch, last_epoch):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(x)
        scheduler.step()
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": epoch,
            "samples": samples,
        }
        torch.save(checkpoint, path)
    save(model, scheduler.get_last_lr()[0], samples)


main()  # as if the job had been stopped here ...
main()  # ... and was started again
