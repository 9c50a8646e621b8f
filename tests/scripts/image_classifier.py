"""A convolutional network with BatchNorm on augmented digits, OneCycleLR per batch."""

import os

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

# elche: import elche

EPOCHS = 3


class Digits(Dataset):
    def __init__(self, part, is_train):
        digits = load_digits()
        self.images = torch.tensor(digits.images[part]).float().unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target[part])
        self.is_train = is_train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.is_train:
            image = image.roll(int(torch.randint(-1, 2, ())), dims=2)
            image = image + 0.1 * torch.randn(image.shape)
        return image, self.labels[index]


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


torch.manual_seed(int(os.environ.get("SEED", "0")))
train_set = Digits(slice(0, 1200), is_train=True)
test_set = Digits(slice(1200, None), is_train=False)
train_loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
test_loader = DataLoader(test_set, batch_size=256)

model = nn.Sequential(block(1, 8), block(8, 16), nn.Flatten(), nn.Linear(64, 10))
# elche: model = elche.convert_sync_batchnorm(model)
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.1, epochs=EPOCHS, steps_per_epoch=len(train_loader)
)
# elche: model, optimizer, train_loader = elche.setup(model, optimizer, train_loader)

samples = 0
for _epoch in range(EPOCHS):
    model.train()
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        samples += len(images)

model.eval()
device = next(model.parameters()).device
with torch.no_grad():
    moved = ((x.to(device), y.to(device)) for x, y in test_loader)
    losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in moved]
save(model, scheduler.get_last_lr()[0], samples, sum(losses) / len(test_set))
