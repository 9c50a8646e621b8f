"""Two optimizers: Muon for the hidden matrices, AdamW for everything else.

python examples/muon.py                                             one device
elche run --speeds 1,0.4 --policy cadence examples/muon.py          two unequal ones

`elche.setup` takes a list of optimizers; the loop steps each of them. The digits come
with scikit-learn.
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
hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
model = nn.Sequential(*hidden, nn.Linear(128, 10))
matrices = [hidden[0].weight, hidden[2].weight]
others = [p for p in model.parameters() if not any(p is m for m in matrices)]
optimizers = [
    torch.optim.Muon(matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw"),
    torch.optim.AdamW(others, lr=3e-3),
]
loader = DataLoader(train, batch_size=32, shuffle=True)

model, optimizers, loader = elche.setup(model, optimizers, loader)

for epoch in range(5):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if elche.is_main_process():
        with torch.no_grad():
            held_out = images[1500:].to(elche.device())
            right = model(held_out).argmax(1).cpu() == labels[1500:]
        print(f"epoch {epoch}: {right.float().mean():.1%} of held-out digits right")
