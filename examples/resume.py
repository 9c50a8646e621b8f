"""A run that is stopped and taken up again, with a schedule, dropout and a counter.

python examples/resume.py --stop-after 55           stops inside the second epoch
python examples/resume.py                           goes on there
elche run --speeds 1,0.25 examples/resume.py        or on two devices

On one device the result is that of a run that was not stopped, bit for bit. The digits
come with scikit-learn.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche

EPOCHS = 5
parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="checkpoints")
parser.add_argument("--stop-after", type=int, default=10**9, help="batches")
arguments = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(
    TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True
)
model, optimizer, loader = elche.setup(model, optimizer, loader, epochs=EPOCHS)
schedule = elche.ProgressLR(optimizer, lambda progress: 1 - progress, EPOCHS * 1500)
elche.resume(arguments.folder)

batches = 0
for epoch in elche.epochs(EPOCHS):
    for x, y in loader:
        schedule.step()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        batches += 1
        if batches == arguments.stop_after:
            elche.save(arguments.folder)  # is made where all ranks pause, soon
        if batches == arguments.stop_after + 10:
            raise SystemExit("stopped")
    if elche.is_main_process():
        correct = (model.eval()(images[1500:]).argmax(1) == labels[1500:]).float()
        model.train()
        print(f"epoch {epoch}: {correct.mean():.2%} of held-out digits right")
