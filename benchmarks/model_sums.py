"""Cost of comparing ranks' parameters: a check; steps of two ranks with and without.

    python -m benchmarks.model_sums [--parameters 2000000] [--epochs 20]

Steps are of two ranks on this host. Checks are on in every second epoch; compared are
the means of the training thread's processor time, which other processes raise less, and
of the wall time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.coordination.accounts.model_checks import EVERY_STEPS
from elche.runtime.epochs.epoch_execution import EpochExecution
from elche.runtime.watch.model_sums import ModelSums

BATCH, STEPS, WIDTH = 64, 40, 512


def model_of(parameters: int) -> nn.Sequential:
    """Layers of 512 features, and a norm between them."""
    layers: list[nn.Module] = []
    for _ in range(max(1, parameters // (WIDTH * WIDTH))):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def check_us(model: nn.Module, times: int = 400) -> float:
    """Median processor time of one check, in turn over all slices."""
    sums, taken = ModelSums(model.named_parameters(), "CPU"), []
    for turn in range(times):
        began_s = time.thread_time()
        sums.begin(turn, turn)
        sums.take(turn)
        taken.append(time.thread_time() - began_s)
    return statistics.median(taken) * 1e6


def train(parameters: int, epochs: int) -> None:
    """One rank: prints the means of both kinds of steps."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(STEPS * BATCH, WIDTH))
    model = model_of(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = elche.setup(model, optimizer, DataLoader(data, BATCH))
    steps: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    made = EpochExecution.sums.fget
    assert made is not None
    for epoch in range(epochs + 1):
        is_on, held = bool(epoch % 2), []

        def sums(execution: EpochExecution, on: bool = is_on) -> ModelSums:
            return made(execution) if on else ModelSums(())

        with mock.patch.object(EpochExecution, "sums", property(sums)):
            for (x,) in loader:
                held.append((time.thread_time(), time.perf_counter()))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if epoch:
            pairs = itertools.pairwise(held)
            steps[is_on] += [(b[0] - a[0], b[1] - a[1]) for a, b in pairs]
    if elche.rank() == 0:
        for at, clock in enumerate(("processor", "wall")):
            off, on = (
                statistics.fmean(each[at] for each in steps[key]) * 1e3
                for key in (False, True)
            )
            print(f"{clock} time of a step: {off:.3f} ms without, {on:.3f} ms with")


def main() -> None:
    """Measures, or starts two ranks of itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=2_000_000)
    parser.add_argument("--epochs", type=int, default=20)
    asked = parser.parse_args()
    if "RANK" in os.environ:
        train(asked.parameters, asked.epochs)
        return
    torch.set_num_threads(1)
    model = model_of(asked.parameters)
    one_us = check_us(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{count} parameters: a check takes {one_us:.0f} us, "
        f"{one_us / EVERY_STEPS:.1f} us a step"
    )
    command = [sys.executable, "-m", "elche", "run", "--speeds", "1,1", __file__]
    more = ["--parameters", str(asked.parameters), "--epochs", str(asked.epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *more], check=True, env=environment)


if __name__ == "__main__":
    main()
