"""What `recovery.py` trains, and its ranks where all are started anew (`--beside`).

The restarted ranks know nothing of the first start but the folder: who dies notes when,
and every rank of the next start when it has taken its first step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

SAMPLES = 4_000
WIDTH = 256
BATCH_SIZE = 32
DRAWN = 2_000_000
KILLED = "killed"
CHECKPOINTS = "checkpoints"
STEPS_AFTER = 20
"""So many steps more, and the restarted run ends."""


def training(batch_size: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and a loader whose one epoch is longer than the run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(10, (SAMPLES,)))
    sampler = RandomSampler(data, True, DRAWN)
    loader: Any = DataLoader(data, batch_size, sampler=sampler)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), loader


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """One step of every contender."""
    x, y = batch
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def die(killed_at: Path) -> None:
    """Writes down when, and is gone."""
    killed_at.write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


class Restarted:
    """This rank's part in the run: who dies in the first start, and when all go on.

    Args:
        folder: of the run.
        victim: the rank that dies.
        delay_s: after its third step, and the first checkpoint where there are any.
    """

    def __init__(self, folder: Path, victim: int, delay_s: float) -> None:
        self._folder, self._delay_s = folder, delay_s
        self._rank = int(os.environ["RANK"])
        self._is_again = (folder / KILLED).exists()
        self._dies = self._rank == victim and not self._is_again
        self._steps = 0

    @property
    def _has_saved(self) -> bool:
        folder = self._folder / CHECKPOINTS
        return not folder.exists() or any(folder.glob("*/manifest.json"))

    def stepped(self) -> bool:
        """A step is over; whether the run is."""
        self._steps += 1
        if self._is_again and self._steps == 1:
            at_s = repr(time.monotonic())
            (self._folder / f"trained{self._rank}").write_text(at_s)
        if self._dies and self._steps >= 3 and self._has_saved:
            self._dies = False
            threading.Timer(self._delay_s, die, [self._folder / KILLED]).start()
        return self._is_again and self._steps > STEPS_AFTER


def torch_rank(restarted: Restarted) -> None:
    """Plain DistributedDataParallel over gloo, started anew from nothing."""
    dist.init_process_group("gloo")
    model, optimizer, loader = training(BATCH_SIZE // dist.get_world_size())
    model = nn.parallel.DistributedDataParallel(model)
    for batch in loader:
        step(model, optimizer, batch)
        if restarted.stepped():
            break
    dist.barrier()
    os._exit(0)  # gloo may abort where the interpreter ends


def elche_rank(restarted: Restarted, policy: str) -> None:
    """A loop over `elche.epochs`, from its last checkpoint."""
    import elche  # torch's ranks do not wait for it

    model, optimizer, loader = elche.setup(
        *training(BATCH_SIZE), policy=policy, leave_out=False, survive=False
    )
    for _ in elche.epochs(1):
        for batch in loader:
            step(model, optimizer, batch)
            if restarted.stepped():
                break
    elche.shutdown()


if __name__ == "__main__":
    kind, folder, victim, delay_s = sys.argv[1:]
    own = Restarted(Path(folder), int(victim), float(delay_s))
    torch_rank(own) if kind == "torch" else elche_rank(own, kind)
