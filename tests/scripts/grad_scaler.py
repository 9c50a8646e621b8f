"""Half precision with a GradScaler, unscaled for clipping."""

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
train_set = TensorDataset(images[:1280], torch.tensor(digits.target[:1280]))
loader = DataLoader(train_set, batch_size=64, shuffle=True)
model = nn.Sequential(
    nn.Linear(64, 48), Residual(48), Residual(48), nn.LayerNorm(48), nn.Linear(48, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
# elche: model, optimizer, loader = elche.setup(model, optimizer, loader)

samples = 0
for _epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        samples += len(x)
save(model, optimizer.param_groups[0]["lr"], samples)
