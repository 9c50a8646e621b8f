"""Trains until told, counting each sample: `counted.py POLICY FOLDER [RANK PLACE]`.

Rank RANK kills itself at PLACE: "backward", or as `plan_death` has it. With "mortal" a
run ends with any rank, as with "meets", where ranks are in a group of torch's own.
With "lasts" a rank outlives its launcher by more than a test takes.
Each sample is counted by what loops were handed, by the model, and by elche; the end
says all three.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled  # noqa: F401 - starts faster
from elche import session
from elche.runtime.epochs.model_sums import checksum
from elche.runtime.process import launcher_watch
from tests.distributed.cases.meetings import Meeting
from tests.distributed.cases.survive_cases import Death, plan_death

SAMPLES, DIES_AT = 200, 4
policy, folder, more = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
own = int(os.environ["RANK"])


class Counting(nn.Module):
    """Counts in a buffer in windows, and by the common gradient under ``sync``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        if policy != "sync":
            self.count += torch.bincount(index, minlength=SAMPLES)
        mean: torch.Tensor = self.seen[index].mean()
        return mean

    def count_step(self) -> None:
        """Before a step at rate 1: a one for each of its samples, whatever its size."""
        gradient = self.seen.grad
        if policy == "sync" and gradient is not None and gradient.any():
            gradient.div_(-gradient[gradient != 0].abs().min()).round_()


def say(what: str) -> None:
    print(f"rank {own} {what} at {time.monotonic():.3f}", flush=True)


if "lasts" in more:
    launcher_watch.END_AFTER_S = 1e3
if "meets" in more:
    meeting = f"file://{folder}/meeting"
    many = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", meeting, rank=own, world_size=many)
torch.manual_seed(3)
net = Counting()
model: Any = net
optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
loader: Any = DataLoader(TensorDataset(torch.arange(SAMPLES)), 10, shuffle=True)
model, optimizer, loader = elche.setup(
    model,
    optimizer,
    loader,
    policy=policy,
    timeout_s=60.0,
    leave_out=False,
    survive="mortal" not in more,
)
hit: Any = int
if more[:1] == [str(own)]:
    death = Death(own, more[1], DIES_AT)
    hit = plan_death(death, str(folder), Meeting("barrier", str(folder), own))
    if more[1] == "backward":
        net.seen.register_hook(lambda gradient: hit())
world, epochs, has_said = elche.world_size(), 0, False
over = folder / "over"
with (folder / f"log{own}.txt").open("w") as log:
    while not elche.any(over.exists()):
        for number, (index,) in enumerate(loader):
            if elche.batch_weight():
                log.write(f"{epochs} {' '.join(map(str, index.tolist()))}\n")
                log.flush()
            if number and epochs >= 8 and not has_said:  # host 0 has, to all, since
                say("trains")
                has_said = True
                if more == [str(own), "sleeps"]:
                    time.sleep(60.0)  # longer than a host that leaves has
            if elche.world_size() != world:
                world = elche.world_size()
                say(f"is one of {world}")
            model(index).backward()
            net.count_step()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
            if more[1:] == ["batch"]:
                hit()
        epochs += 1
run = session.current_run()
assert run is not None
counts = net.seen.round().long() if policy == "sync" else net.count
print(
    f"rank {own} is done, one of {elche.world_size()}: {epochs} epochs, "
    f"{int(counts.min())} to {int(counts.max())} times, "
    f"{elche.progress_samples():g} samples, {checksum(net)}, "
    f"by {run.worker.group.transport}",
    flush=True,
)
elche.shutdown()
