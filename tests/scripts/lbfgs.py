"""Sine waves predicted by an LSTM under LBFGS, as in pytorch/examples."""

import torch
import torch.nn.functional as F
from saved import save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.linear = nn.Linear(16, 1)

    def forward(self, x):
        return self.linear(self.lstm(x.unsqueeze(2))[0]).squeeze(2)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
start = torch.randint(-40, 40, (48, 1))
waves = torch.sin((torch.arange(41) + start) / 6.0)
loader = DataLoader(TensorDataset(waves[:, :-1], waves[:, 1:]), batch_size=48)
model = Sequence()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=10)
# elche: model, optimizer, loader = elche.setup(model, optimizer, loader)

samples = 0
for _epoch in range(5):
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        samples += len(x)
save(model, optimizer.param_groups[0]["lr"], samples)
