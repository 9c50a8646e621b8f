"""A model, data and a loop's parts: what examples of the user documents take as given.

`tests/test_docs.py` puts this before each of them, so that pages show their subject.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
epochs = 2
train_set = TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
x, y = train_set[:8]
loader = DataLoader(train_set, batch_size=8, shuffle=True)
test_loader = DataLoader(train_set, batch_size=8)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
batch = target = torch.randn(8, 16)
layers = [nn.Linear(16, 16) for _ in range(4)]
train_loader = DataLoader(TensorDataset(torch.randn(24, 16), torch.randn(24, 16)), 8)


def model_fn():
    """The model of a Trainer."""
    return nn.Linear(4, 3)


def optimizer_fn(parameters):
    """Its optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


loss_fn = F.cross_entropy
