"""DCGAN as in pytorch/examples: two networks with BatchNorm, an optimizer for each."""

import os

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche

NOISE, EPOCHS = 16, 3

torch.manual_seed(int(os.environ.get("SEED", "0")))
images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
loader = DataLoader(
    TensorDataset(images[:1536]), batch_size=64, shuffle=True, drop_last=True
)
generator = nn.Sequential(
    nn.ConvTranspose2d(NOISE, 32, 4, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
    nn.Tanh(),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 16, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(512, 1),
)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
gan = nn.ModuleList([generator, discriminator])
# elche: gan = elche.convert_sync_batchnorm(gan)
# elche: gan, optimizer_d, loader = elche.setup(gan, optimizer_d, loader)

samples = 0
for _epoch in range(EPOCHS):
    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), NOISE, 1, 1))

        optimizer_d.zero_grad()
        loss_d = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss_d.backward()
        output = discriminator(fake.detach())
        F.binary_cross_entropy_with_logits(output, zeros).backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
        samples += len(real)

gan.eval()
with torch.no_grad():
    drawn = generator(torch.randn(512, NOISE, 1, 1))
score = F.mse_loss(drawn.mean(0), images.mean(0))
save(gan, optimizer_g.param_groups[0]["lr"], samples, score)
