"""A compiled model; the backend that needs no C++ compiler."""

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
train_set = TensorDataset(images[:1280], torch.tensor(digits.target[:1280]))
loader = DataLoader(train_set, batch_size=64, shuffle=True)
model = torch.compile(Net(), backend="aot_eager")
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
# elche: model, optimizer, loader = elche.setup(model, optimizer, loader)

samples = 0
for _epoch in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        samples += len(x)
    scheduler.step()
save(model, scheduler.get_last_lr()[0], samples)
