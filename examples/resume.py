"""A run that is stopped and taken up again, with a schedule and metrics.

python examples/resume.py --stop-after 2            trains two of five epochs
python examples/resume.py                           the other three
elche run --speeds 1,0.25 examples/resume.py        on two devices

Each rank saves what is its own, between epochs, and takes it up after `elche.setup`. On
one device the result is that of a run that was not stopped. The digits come with
scikit-learn.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche

EPOCHS = 5
parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
parser.add_argument("--stop-after", type=int, default=EPOCHS, help="epochs")
arguments = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)

torch.manual_seed(0)
order = torch.Generator().manual_seed(0)  # of the samples; drawn on rank 0
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(
    TensorDataset(images[:1500], labels[:1500]),
    batch_size=32,
    shuffle=True,
    generator=order,
)
model, optimizer, loader = elche.setup(
    model, optimizer, loader, epochs=EPOCHS, policy="sync"
)
schedule = elche.ProgressLR(optimizer, lambda progress: 1 - progress, EPOCHS * 1500)

path = arguments.folder / f"rank{elche.rank()}.pt"
path.parent.mkdir(parents=True, exist_ok=True)
first_epoch = 0
if path.exists():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    order.set_state(saved["order"])
    elche.load_state_dict(saved["elche"])
    first_epoch = saved["epoch"] + 1

for epoch in range(first_epoch, min(EPOCHS, arguments.stop_after)):
    for x, y in loader:
        schedule.step()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        elche.log_scalar("loss", loss)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "order": order.get_state(),
        "elche": elche.state_dict(),
        "epoch": epoch,
    }
    torch.save(state, path)
    if elche.is_main_process():
        told = elche.epoch_metrics()
        shares = ", ".join(f"{share:.0%}" for share in told.shares)
        print(f"epoch {epoch}: loss {told.scalars['loss']:.4f}, shares {shares}")
