"""What `elche.setup` costs a training on one device, per step.

    OMP_NUM_THREADS=1 python benchmarks/single_device.py

Paired passes over the same loader, with and without elche; the median of the
differences and its 95 % interval, in processor time and in wall time. The bar is 10 µs
of processor time. The number of calls is a test
(`tests/runtime/test_single_device.py`); their time depends on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche

STEPS = 256


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """A model so small that a step is nearly all Python."""
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(STEPS, 4)), 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def pass_s(model: nn.Module, optimizer: Any, loader: Any) -> tuple[float, float]:
    """Processor seconds and seconds of one epoch."""
    began_s = time.process_time(), time.perf_counter()
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - began_s[0], time.perf_counter() - began_s[1]


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics about it that hold 95 %."""
    ordered = sorted(values)
    half = int(0.98 * len(ordered) ** 0.5) + 1
    middle = len(ordered) // 2
    return statistics.median(ordered), ordered[middle - half], ordered[middle + half]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=101)
    args = parser.parse_args()
    plain, ours = parts(), elche.setup(*parts())
    pass_s(*plain), pass_s(*ours)
    pairs = [(pass_s(*ours), pass_s(*plain)) for _ in range(args.pairs)]
    for column, name in enumerate(("processor_us", "wall_us")):
        scale = 1e6 / STEPS
        differences = [(mine[column] - their[column]) * scale for mine, their in pairs]
        step_us = statistics.median(their[column] for _, their in pairs) * scale
        median, low, high = interval(differences)
        print(
            f"{name:13} plain step {step_us:6.1f}, added {median:5.2f} "
            f"({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()
