"""A script in which a rank ends in some way: `outlived.py RANK HOW POLICY [MORE]`."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import elche
import tests.harness.uncompiled  # noqa: F401 - starts faster

ENDS_AT = 6
rank, how, policy = int(sys.argv[1]), sys.argv[2], sys.argv[3]
own = elche.rank()
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(400, 4))


class Evens(Sampler[int]):
    """The even samples, then the odd ones."""

    def __iter__(self) -> Iterator[int]:
        yield from (*range(0, 400, 2), *range(1, 400, 2))

    def __len__(self) -> int:
        return 400


order = {"sampler": Evens()} if "own" in sys.argv else {"shuffle": True}
workers = 2 * ("workers" in sys.argv)
loader: Any = DataLoader(data, batch_size=4, num_workers=workers, **order)  # type: ignore[arg-type]
model, optimizer, loader = elche.setup(model, optimizer, loader, policy=policy)
longest_s = 0.0  # between two batches of an epoch
for epoch in range(2):
    last_s = math.inf
    for number, (x,) in enumerate(loader):
        if (own, epoch, number) == (rank, 0, ENDS_AT):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "quit":
                os._exit(7)
            elif how == "sleep":
                time.sleep(float(sys.argv[4]))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002)
        longest_s = max(longest_s, time.monotonic() - last_s)
        last_s = time.monotonic()
    elche.barrier()
sys.stdout.write(
    f"done {elche.rank()} of {elche.world_size()}: {elche.progress_samples():g} "
    f"samples, sum {sum(float(p.detach().sum()) for p in model.parameters())!r}, "
    f"at most {longest_s:.3f} s between batches\n"
)
