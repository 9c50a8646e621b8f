"""A small GAN, two models with two optimizers, whose batches `elche.share` divides.

python examples/by_share/gan.py                              one device
elche run --speeds 1,0.25 examples/by_share/gan.py           one four times slower
elche run --devices cuda:0,cpu examples/by_share/gan.py      a GPU and the CPU

The generator learns a ring of eight Gaussians. Every rank draws its part of 128 points
by itself; gradients are weighted by the parts.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import elche

group = elche.init_group()
device = elche.device()
torch.manual_seed(group.rank)  # every rank draws points of its own


def real_samples(count: int) -> torch.Tensor:
    """Points of the ring."""
    angles = torch.randint(8, (count,)) * (2 * math.pi / 8)
    ring = torch.stack([angles.cos(), angles.sin()], 1)
    return (2.0 * ring + 0.05 * torch.randn(count, 2)).to(device)


generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
generators = elche.Replica.wrap(generator, group, name="generator")
critics = elche.Replica.wrap(critic, group, name="critic")
generator_optimizer = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.9))

for step in range(401):
    count = len(elche.share(128))  # by the time of both models' steps
    real, fake = real_samples(count), generator(torch.randn(count, 8, device=device))

    critic_loss = F.softplus(-critic(real)).mean()
    critic_loss = critic_loss + F.softplus(critic(fake.detach())).mean()
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critics.weighted_all_reduce_gradients(count)
    critic_optimizer.step()

    generator_loss = F.softplus(-critic(fake)).mean()
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generators.weighted_all_reduce_gradients(count)
    generator_optimizer.step()

    if step % 100 == 0:
        spread = fake.detach().std(0).mean().item()
        print(f"step {step} rank {group.rank}: {count} samples, spread {spread:.2f}")

critics.check_equal()
