"""An IterableDataset over a text with a shuffle buffer, read by one worker."""

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from saved import save
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

# elche: import elche

CONTEXT, LINES, EPOCHS = 16, 600, 2


class Lines(IterableDataset):
    """Yields pieces of lines as they come, mixed by a buffer."""

    def __init__(self, path, limit, buffer_size=64):
        self.path, self.limit, self.buffer_size = path, limit, buffer_size

    def __iter__(self):
        mixed, buffer, left = random.Random(0), [], self.limit
        for line in self.path.open():
            codes = [min(ord(c), 127) for c in line.strip()[: CONTEXT + 1]]
            if len(codes) <= CONTEXT or not left:
                continue
            left -= 1
            buffer.append(torch.tensor(codes))
            if len(buffer) == self.buffer_size:
                yield buffer.pop(mixed.randrange(len(buffer)))
        mixed.shuffle(buffer)
        yield from buffer


class NextCharacter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 16)
        self.body = nn.Sequential(nn.Linear(CONTEXT * 16, 64), nn.Tanh())
        self.head = nn.Linear(64, 128)

    def forward(self, x):
        return self.head(self.body(self.embed(x).flatten(1)))


torch.manual_seed(0)
dataset = Lines(Path(argparse.__file__), LINES)
loader = DataLoader(dataset, batch_size=16, num_workers=1)
model = NextCharacter()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
# elche: model, optimizer, loader = elche.setup(
# elche:     model, optimizer, loader, samples_per_epoch=LINES)

samples = 0
for _epoch in range(EPOCHS):
    for codes in loader:
        x, y = codes[:, :CONTEXT], codes[:, CONTEXT]
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples += len(codes)
save(model, optimizer.param_groups[0]["lr"], samples)
