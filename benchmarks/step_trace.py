"""Files and Python calls of elche in one steady step under ``sync``.

elche run --nproc 2 benchmarks/step_trace.py
elche run --nproc 2 benchmarks/step_trace.py --calls        every call, by part
elche run --nproc 3 benchmarks/step_trace.py --death        of a survivor

A step lasts from one batch to the next. Calls are counted by `sys.setprofile`, each
resumption of a generator among them, on rank 0. Figures are of the median step; where
the machine is busy, grants are short, and that is a step with a report. With
``--death`` the last rank kills itself, and calls count from the error that tells the
survivor to the end of the backward pass that it broke off.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche

HOME = str(Path(elche.__file__).parent)
PARTS = "next(loader)", "forward", "backward", "optimizer"
WARM, STEPS = 20, 40
LOST, CLOSED = "_lost_error", "BucketPass._close"
"""Functions where a survivor learns of a death, and where its pass ends."""
Calls = Counter[tuple[str, str, str]]


class Tracer:
    """Counts calls of elche's functions, by part of the step.

    Attributes:
        part: of the step that runs now.
        calls: by part, file and function, since the last :meth:`take`.
    """

    def __init__(self) -> None:
        self.part = PARTS[0]
        self.calls: Calls = Counter()

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        """A call, or something else that a profiler sees."""
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and name == LOST and self.part != LOST:
            self.take()
            self.part = LOST
        if event == "return" and name == CLOSED and self.part == LOST:
            sys.setprofile(None)
        if event == "call" and path.startswith(HOME):
            file = path[len(HOME) + 1 :]
            self.calls[self.part, file, name] += 1

    def take(self) -> Calls:
        """Calls of the step that ends here."""
        calls, self.calls = self.calls, Counter()
        return calls


def traced(seed: int | None, *, has_death: bool = False) -> list[Calls]:
    """Trains a small model; returns the calls of each steady step, or of a death."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(32 * STEPS, 16), torch.randn(32 * STEPS, 1))
    loader: Any = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, policy="sync", seed=seed
    )
    tracer, steps = Tracer(), []
    for _ in elche.epochs(2):
        for number, (x, y) in enumerate(loader):
            sys.setprofile(None)
            steps.append((number, tracer.take()))
            sys.setprofile(tracer)
            if has_death and number == WARM and elche.rank() == elche.world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            tracer.part = "forward"
            loss = nn.functional.mse_loss(model(x), y)
            tracer.part = "backward"
            optimizer.zero_grad()
            loss.backward()
            if tracer.part == LOST:
                return [tracer.take()]
            tracer.part = "optimizer"
            optimizer.step()
            tracer.part = PARTS[0]
        sys.setprofile(None)
    return [calls for number, calls in steps if number >= WARM]


def main() -> None:
    """Prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of the run, and of each sample")
    parser.add_argument("--calls", action="store_true", help="list every call")
    parser.add_argument("--death", action="store_true", help="of the last rank")
    arguments = parser.parse_args()
    found = traced(arguments.seed, has_death=arguments.death)
    steps = sorted(found, key=Counter.total)
    if elche.rank():
        return
    median = steps[len(steps) // 2]
    print(f"{'part':13} {'files':>5} {'calls':>5}")
    for part in (LOST,) if arguments.death else PARTS:
        own = {key: count for key, count in median.items() if key[0] == part}
        print(f"{part:13} {len({k[1] for k in own}):5} {sum(own.values()):5}")
        for (_, file, name), count in own.items() if arguments.calls else ():
            print(f"    {count:4} {file}:{name}")
    for name, step in ("median", median), ("least", steps[0]), ("most", steps[-1]):
        files = len({key[1] for key in step})
        print(f"{name:13} {files:5} {step.total():5}  (of {len(steps)} steps)")


if __name__ == "__main__":
    main()
