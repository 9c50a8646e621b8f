"""Trains until it is told to stop, whoever comes and goes.

`growing.py FOLDER POLICY [RATE [EPOCHS]]`

Files in the folder tell it: "begin", "stop", "fail". Samples are counted three times:
by what loops were handed, by the model, and by elche.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.process import process
from elche.runtime.rank_settings import checksum

SAMPLES = 640
WITHIN_S = 100.0
folder, policy, rate = Path(sys.argv[1]), sys.argv[2], float([*sys.argv, "1"][3])
epochs = int(sys.argv[4]) if len(sys.argv) > 4 else 100_000


class Counting(nn.Module):
    """Counts how often each sample was trained on, beside what it learns.

    In a buffer in windows, and by the common gradient of `seen` under ``sync``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SAMPLES))
        self.seen = nn.Parameter(torch.zeros(SAMPLES))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        if policy != "sync":
            self.count += torch.bincount(index, minlength=SAMPLES)
        return (self.w[index] - 1.0).square().mean() + self.seen[index].mean()

    def count_step(self) -> None:
        """Before a step at rate 1: a one for each of its samples, whatever its size."""
        gradient = self.seen.grad
        if policy == "sync" and gradient is not None and gradient.any():
            gradient.div_(-gradient[gradient != 0].abs().min()).round_()

    def counts(self) -> list[int]:
        return (self.seen.round().long() if policy == "sync" else self.count).tolist()


def wait_for(path: Path) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not path.exists():
        assert time.monotonic() < until_s, f"nobody made {path}"
        time.sleep(0.01)


wait_for(folder / "begin")
torch.manual_seed(5)
net = Counting()
model: Any = net
groups: Any = [{"params": [net.w]}, {"params": [net.seen], "lr": 1.0, "momentum": 0.0}]
optimizer: Any = torch.optim.SGD(groups, lr=rate, momentum=0.1)
loader: Any = DataLoader(TensorDataset(torch.arange(SAMPLES)), 16, shuffle=True)
model, optimizer, loader = elche.setup(
    model, optimizer, loader, policy=policy, timeout_s=60.0, leave_out=False
)
epoch = -1
with (folder / f"handed-{os.environ['RANK']}.txt").open("w") as handed:
    for epoch in elche.epochs(epochs):
        for number, (index,) in enumerate(loader):
            if number == 1 and elche.is_main_process():
                by = process.run.worker.group.transport  # type: ignore[union-attr]
                print(f"epoch {epoch} of {elche.world_size()} by {by}", flush=True)
            handed.write(f"{epoch} {' '.join(map(str, index.tolist()))}\n")
            handed.flush()
            model(index).backward()
            net.count_step()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
        if elche.is_main_process():
            if (folder / "fail").exists():
                raise ValueError("a fault in user code")
            if (folder / "stop").exists():
                (folder / "last").touch()  # all see it behind the barrier
        elche.barrier()
        if (folder / "last").exists():
            break
assert net.counts() == [epoch + 1] * SAMPLES, net.counts()
assert elche.progress_samples() == SAMPLES * (epoch + 1), elche.progress_samples()
end = f"{epoch + 1} epochs, {checksum(net)}"
print(f"done {elche.rank()} of {elche.world_size()}: {end}")
