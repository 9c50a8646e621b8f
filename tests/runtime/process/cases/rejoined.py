"""A script in which rank 1 is killed once, and ends an epoch after another has come."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled  # noqa: F401 - starts faster
from elche.runtime.process.launchers import launch_facts

own = elche.rank()
is_joiner = launch_facts().joins
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(400, 4))
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = elche.setup(model, optimizer, loader, policy=sys.argv[1])
has_shrunk, epochs = is_joiner, 0
for epoch in elche.epochs(1000):
    for number, (x,) in enumerate(loader):
        if (own, epoch, number) == (1, 0, 4) and not is_joiner:
            os.kill(os.getpid(), signal.SIGKILL)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.004)
        has_shrunk |= elche.world_size() == 2
    elche.barrier()
    epochs = epoch + 1
    if has_shrunk and elche.world_size() == 3:
        break
assert elche.progress_samples() == 400 * epochs, (elche.progress_samples(), epochs)
sys.stdout.write(
    f"done {elche.rank()} of {elche.world_size()}: "
    f"sum {sum(float(p.detach().sum()) for p in model.parameters())!r}\n"
)
