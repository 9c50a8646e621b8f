"""Manual control: a small GAN, two models in one group, reduced when the loop says so.

python examples/gan.py                              one device
elche run --nproc 2 examples/gan.py                 two CPU processes
elche run --devices cuda:0,cpu examples/gan.py      a GPU and the CPU, unequal batches

The generator learns a ring of eight Gaussians. Every rank draws samples of its own, as
many as it likes; gradients are weighted by them. BatchNorm normalises over the batches
of all ranks together.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import elche

group = elche.init_group()
device = elche.device()
torch.manual_seed(group.rank)
batch_size = 96 if group.rank == 0 else 32  # a fast rank takes more


def real_samples(count: int) -> torch.Tensor:
    """Points of the ring."""
    angles = torch.randint(8, (count,)) * (2 * math.pi / 8)
    ring = torch.stack([angles.cos(), angles.sin()], 1)
    return (2.0 * ring + 0.05 * torch.randn(count, 2)).to(device)


generator = elche.convert_sync_batchnorm(
    nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
).to(device)
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)

generators = elche.Replica.wrap(generator, group, name="generator")
critics = elche.Replica.wrap(critic, group, name="critic")
generator_optimizer = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.9))

for step in range(601):
    real = real_samples(batch_size)
    fake = generator(torch.randn(batch_size, 8, device=device))

    critic_loss = (
        F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    )
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critics.weighted_all_reduce_gradients(batch_size)
    critic_optimizer.step()

    generator_loss = F.softplus(-critic(fake)).mean()
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generators.weighted_all_reduce_gradients(batch_size)
    generator_optimizer.step()

    if step % 200 == 0 and elche.is_main_process():
        spread = fake.detach().std(0).mean().item()
        print(f"step {step}: spread {spread:.2f} of 1.41", flush=True)

generators.check_equal()
critics.check_equal()
