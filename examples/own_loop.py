"""A plain PyTorch loop on several devices: one added line, `elche.setup`.

python examples/own_loop.py                              one device
elche run --nproc 2 examples/own_loop.py                 two CPU processes
elche run --speeds 1,0.25 examples/own_loop.py           one of them four times slower
elche run --devices cuda:0,cpu examples/own_loop.py      a GPU and the CPU

Every rank runs the whole script. The digits come with scikit-learn.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1500], labels[:1500])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(train, batch_size=32, shuffle=True)

model, optimizer, loader = elche.setup(model, optimizer, loader)

for epoch in range(5):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if elche.is_main_process():
        with torch.no_grad():
            held_out = images[1500:].to(elche.device())
            right = model(held_out).argmax(1).cpu() == labels[1500:]
        print(f"epoch {epoch}: {right.float().mean():.1%} of held-out digits right")
