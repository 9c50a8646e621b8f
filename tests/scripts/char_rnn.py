"""A character LSTM by truncated backpropagation: its state is carried over batches."""

import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from saved import save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: from elche import setup

COLUMNS, LENGTH, EPOCHS = 12, 25, 3


class CharRNN(nn.Module):
    def __init__(self, vocabulary=128, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 24)
        self.lstm = nn.LSTM(24, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x, state):
        output, state = self.lstm(self.embed(x), state)
        return self.head(output), state


text = Path(textwrap.__file__).read_text()
data = torch.tensor([min(ord(c), 127) for c in text])
steps = (len(data) - 1) // (COLUMNS * LENGTH)


def batchify(row):
    """Batch k holds the k-th piece of every column, so that a state finds its text."""
    row = row[: COLUMNS * steps * LENGTH].view(COLUMNS, steps, LENGTH)
    return row.transpose(0, 1).flatten(0, 1)


torch.manual_seed(0)
loader = DataLoader(
    TensorDataset(batchify(data[:-1]), batchify(data[1:])), batch_size=COLUMNS
)
model = CharRNN()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
# elche: model, optimizer, loader = setup(model, optimizer, loader, shares="fixed")

samples = 0
for _epoch in range(EPOCHS):
    state = None
    for x, y in loader:
        logits, state = model(x, state)
        state = tuple(each.detach() for each in state)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        samples += len(x)
    scheduler.step()
save(model, scheduler.get_last_lr()[0], samples)
