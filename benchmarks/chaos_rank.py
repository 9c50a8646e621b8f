"""What every rank of `benchmarks/chaos.py` runs: training that counts its samples."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche.runtime.process.launchers import launch_facts
from elche.runtime.watch.model_sums import ModelSums
from elche.session.process import current_run

SAMPLES = 4_000
FEATURES = 32
OVER = "over"
"""File by which the parent ends a run."""


class Counting(nn.Module):
    """Linear regression that counts how often it was trained on each sample.

    In windows a buffer counts, whose increments are summed. In common steps a parameter
    does, by the common gradient: that is not zero for the samples of the step.

    Args:
        policy: of the run.
    """

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, 1)
        may_step = policy in ("sync", "auto")
        self.seen = nn.Parameter(torch.zeros(SAMPLES), requires_grad=may_step)
        self.in_windows = not may_step
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        """What is predicted of these samples, and a zero that has their gradient."""
        if self.training and self.in_windows:
            self.count += torch.bincount(index, minlength=SAMPLES)
        seen, is_step = self.seen[index], not self.in_windows
        return [self.line(x)[:, 0], is_step * (seen - seen.detach()).mean()]

    def count_step(self) -> None:
        """Before the optimizer's step, at rate 1: a one for each of its samples."""
        if (gradient := self.seen.grad) is not None and gradient.any():
            gradient.div_(-gradient[gradient != 0].abs().min()).round_()

    def counts(self) -> torch.Tensor:
        """Of each sample."""
        return self.count + self.seen.round().long()


class Points(Dataset[Any]):
    """Index, features and what is to be learnt of them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        noise = 0.1 * torch.randn(SAMPLES, generator=generator)
        self.y = self.x @ torch.linspace(-1.0, 1.0, FEATURES) + noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


def train(spec: dict[str, Any]) -> None:
    """On every rank: trains until the parent says so."""
    rank = int(os.environ["RANK"])
    if launch_facts().joins:
        _say(rank=rank, pid=os.getpid())
    torch.manual_seed(spec["seed"])
    model, points = Counting(spec["policy"]), Points()
    optimizer = torch.optim.SGD(
        [{"params": model.line.parameters()}, {"params": [model.seen], "lr": 1.0}],
        lr=0.02,
    )
    loader: Any = DataLoader(points, batch_size=32, shuffle=True)
    model, optimizer, loader = elche.setup(
        model,
        optimizer,
        loader,
        policy=spec["policy"],
        timeout_s=60.0,
        leave_out=False,  # nobody may die while a rank is left out
    )
    over, epochs = Path(spec["folder"], OVER), 0
    longest_s = 0.0
    with Path(spec["folder"], f"log{rank}.txt").open("w") as log:
        for epoch in elche.epochs(1_000_000):
            last_s = math.inf
            for index, x, y in loader:
                longest_s = max(longest_s, time.monotonic() - last_s)
                last_s = time.monotonic()
                counts = index.tolist() if elche.batch_weight() else []
                log.write(f"{epoch} {' '.join(map(str, counts))}\n")
                log.flush()
                run = current_run()
                model.in_windows = run is not None and run.policy != "sync"
                predicted, mark = model(index, x)
                (nn.functional.mse_loss(predicted, y) + mark).backward()
                model.count_step()
                optimizer.step()
                optimizer.zero_grad()
                _say(rank=rank, pid=os.getpid(), trains=True)
                if over.exists():
                    break  # which ends the epoch for all
            run = current_run()
            is_early = run is None or run.was_left_early
            epochs = epoch + (not is_early)
            if is_early:
                break
    model.eval()
    with torch.no_grad():
        predicted, _ = model(torch.arange(SAMPLES), points.x)
        loss = nn.functional.mse_loss(predicted, points.y)
    counts = model.counts()
    _say(
        rank=rank,
        epochs=epochs,
        counted=[int(counts.min()), int(counts.max())],
        samples=int(counts.sum()),
        progress=elche.progress_samples(),
        checksum=checksum(model),
        loss=float(loss),
        longest_s=longest_s,
    )
    elche.shutdown()


_said: set[tuple[str, ...]] = set()


def _say(**values: Any) -> None:
    """One line for the parent; the same kind of line once."""
    if (kind := tuple(values)) not in _said:
        _said.add(kind)
        print(json.dumps(values), flush=True)


def checksum(model: nn.Module) -> str:
    """Checksum of the bits of all parameters."""
    rows = ModelSums(model.named_parameters()).whole()
    return "-".join(f"{row[3]:x}" for row in rows)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
