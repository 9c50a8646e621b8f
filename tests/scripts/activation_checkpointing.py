"""Activation checkpointing in every block of a residual network."""

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.silu(self.conv1(self.norm(x))))


class ResNet(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
train_set = TensorDataset(images[:1200], torch.tensor(digits.target[:1200]))
loader = DataLoader(train_set, batch_size=48, shuffle=True)
model = ResNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# elche: model, optimizer, loader = elche.setup(model, optimizer, loader)

samples = 0
for _epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples += len(x)
save(model, optimizer.param_groups[0]["lr"], samples)
