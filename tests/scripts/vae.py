"""A variational autoencoder as in pytorch/examples: the loss is a sum."""

import os

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.fc21, self.fc22 = nn.Linear(48, 6), nn.Linear(48, 6)
        self.fc3, self.fc4 = nn.Linear(6, 48), nn.Linear(48, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        if not self.training:
            return mu
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


torch.manual_seed(int(os.environ.get("SEED", "0")))
images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
train_loader = DataLoader(TensorDataset(images[:1500]), batch_size=50, shuffle=True)
model = VAE()
optimizer = torch.optim.SGD(model.parameters(), lr=2e-4, momentum=0.9)
# elche: model, optimizer, train_loader = elche.setup(
# elche:     model, optimizer, train_loader, loss_reduction="sum"
# elche: )

samples = 0
for _epoch in range(2):
    model.train()
    for (data,) in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        samples += len(data)

model.eval()
with torch.no_grad():
    held_out = images[1500:].to(next(model.parameters()).device)
    score = loss_function(model(held_out)[0], held_out, *model(held_out)[1:])
save(model, optimizer.param_groups[0]["lr"], samples, score / len(held_out))
