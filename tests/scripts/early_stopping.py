"""Early stopping on a validation loss, ReduceLROnPlateau, and the best weights kept."""

import copy

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche

MAX_EPOCHS, PATIENCE = 40, 3


def evaluate(model, loader):
    model.eval()
    device, total = next(model.parameters()).device, 0.0
    with torch.no_grad():
        for x, y in loader:
            out = model(x.to(device))
            total += F.mse_loss(out, y.to(device), reduction="sum").item()
    model.train()
    return total / len(loader.dataset)


torch.manual_seed(0)
x, y = load_diabetes(return_X_y=True)
x = torch.tensor(x, dtype=torch.float32) * 20
y = torch.tensor(y, dtype=torch.float32).unsqueeze(1) / 100
train_loader = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=32, shuffle=True)
val_loader = DataLoader(TensorDataset(x[320:], y[320:]), batch_size=64)
model = nn.Sequential(
    *(nn.Linear(10, 64), nn.ReLU()), *(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 1)
)
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
    optimizer, factor=0.5, patience=1
)
# elche: model, optimizer, train_loader = elche.setup(model, optimizer, train_loader)

samples, best, bad_epochs, best_state = 0, float("inf"), 0, None
for _epoch in range(MAX_EPOCHS):
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        samples += len(inputs)
    val_loss = evaluate(model, val_loader)
    scheduler.step(val_loss)
    if val_loss < best - 1e-4:
        best, bad_epochs = val_loss, 0
        best_state = copy.deepcopy(model.state_dict())
    else:
        bad_epochs += 1
        if bad_epochs >= PATIENCE:
            break
assert bad_epochs == PATIENCE, "did not stop early"
model.load_state_dict(best_state)
save(model, optimizer.param_groups[0]["lr"], samples)
