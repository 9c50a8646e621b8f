"""Trains until it is told to stop, whoever comes and goes.

`growing.py FOLDER POLICY [RATE [EPOCHS]]`; "POLICY alone" takes in nobody.

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
import tests.harness.uncompiled  # noqa: F401 - starts faster
from elche.process import process
from elche.runtime.epochs.model_sums import checksum

SAMPLES = 640
WITHIN_S = 100.0
folder, rate = Path(sys.argv[1]), float([*sys.argv, "1"][3])
policy, *alone = sys.argv[2].split()
epochs = int(sys.argv[4]) if len(sys.argv) > 4 else 100_000


class Counting(nn.Module):
    """Counts how often each sample was trained on: in windows in a buffer.

    In common steps by the gradient, which is not zero for the samples of the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SAMPLES))
        self.seen = nn.Parameter(torch.zeros(SAMPLES))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, index: torch.Tensor, *, in_windows: bool) -> torch.Tensor:
        if in_windows:
            self.count += torch.bincount(index, minlength=SAMPLES)
        loss, seen = (self.w[index] - 1.0).square().mean(), self.seen[index]
        return loss if in_windows else loss + (seen - seen.detach()).mean()

    def count_step(self) -> None:
        """Before an optimizer step at rate 1: a one for each of its samples."""
        if (gradient := self.seen.grad) is not None:
            gradient.div_(-gradient[gradient != 0].abs().min()).round_()


def wait_for(path: Path) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not path.exists():
        assert time.monotonic() < until_s, f"nobody made {path}"
        time.sleep(0.01)


wait_for(folder / "begin")
torch.manual_seed(5)
model: Any = Counting()
optimizer: Any = torch.optim.SGD(
    [{"params": [model.w], "momentum": 0.1}, {"params": [model.seen], "lr": 1.0}],
    lr=rate,
)
loader: Any = DataLoader(TensorDataset(torch.arange(SAMPLES)), 16, shuffle=True)
model, optimizer, loader = elche.setup(
    *(model, optimizer, loader),
    policy=policy,
    timeout_s=60.0,
    leave_out=False,
    survive=not alone,
)
epoch = -1
with (folder / f"handed-{os.environ['RANK']}.txt").open("w") as handed:
    for epoch in elche.epochs(epochs):
        for number, (index,) in enumerate(loader):
            if number == 1 and elche.is_main_process():
                by = process.run.worker.group.transport  # type: ignore[union-attr]
                print(f"epoch {epoch} of {elche.world_size()} by {by}", flush=True)
            counts = index.tolist() if elche.batch_weight() else []
            print(epoch, *counts, file=handed, flush=True)
            in_windows = process.run.policy != "sync"  # type: ignore[union-attr]
            model(index, in_windows=in_windows).backward()
            model.count_step()
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
total = model.count + model.seen.round().long()
assert total.tolist() == [epoch + 1] * SAMPLES, total
assert elche.progress_samples() == SAMPLES * (epoch + 1), elche.progress_samples()
end = f"{epoch + 1} epochs, {checksum(model)}"
print(f"done {elche.rank()} of {elche.world_size()}: {end}")
