"""elche's measured plan beside torch's schedules, on real layers of unequal sizes.

    elche run --nproc 2 benchmarks/pipeline/real.py --quota 1,0.4

Each rank is held to a part of its core. Torch's schedules have the split of whole
layers whose busiest device has the least work, by the times of the layers alone.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

from benchmarks.pipeline.contender import (
    torch_placement,
    torch_schedule,
    torch_stages,
)
from benchmarks.pipeline.plan import TORCH_CONTENDERS
from elche.pipeline import Pipeline

WIDTH, LENGTH, SAMPLES, MICRO_BATCHES = 128, 64, 4, 8
WIDENED = (128, 1024, 256, 2048) * 3
"""Of the layers' inner widths."""
PLAN = "elche.pipeline.setup.measured_plan"


def layers() -> list[nn.Module]:
    """Layers of transformers; some are several times as slow as others."""
    torch.manual_seed(0)
    return [
        nn.TransformerEncoderLayer(WIDTH, 4, wide, dropout=0.0, batch_first=True)
        for wide in WIDENED
    ]


def layer_times_s(sample: torch.Tensor) -> list[float]:
    """Forward and backward of each layer alone, medians of five."""
    found = []
    for layer in layers():
        times_s = []
        for _ in range(5):
            begin_s = time.monotonic()
            layer(sample.requires_grad_()).sum().backward()
            times_s.append(time.monotonic() - begin_s)
        found.append(median(times_s))
    return found


def split_by_hand(
    placement: Sequence[int], times_s: Sequence[Sequence[float]]
) -> tuple[int, ...]:
    """Sizes of the stages, with the least work of the busiest device."""
    total = len(times_s[0])

    def works_s(cuts: tuple[int, ...]) -> list[float]:
        found = [0.0] * len(times_s)
        edges = (0, *cuts, total)
        for device, begin, end in zip(placement, edges, edges[1:], strict=False):
            found[device] += sum(times_s[device][begin:end])
        return sorted(found, reverse=True)

    cuts = min(itertools.combinations(range(1, total), len(placement) - 1), key=works_s)
    return tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def step_s(step: Callable[[], object]) -> float:
    """Time of a step until all ranks are done."""
    dist.barrier()
    begin_s = time.monotonic()
    step()
    dist.barrier()
    return time.monotonic() - begin_s


class PlannedTime(logging.Handler):
    """Keeps the step time that the plan predicts."""

    predicted_s = float("nan")

    def emit(self, record: logging.LogRecord) -> None:
        """Takes it from the line of the log."""
        if record.msg.startswith("measured plan") and isinstance(record.args, tuple):
            self.predicted_s = float(str(record.args[-1]))
            print(record.getMessage())


def main() -> None:
    """Measures in turn, and prints medians of the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quota", default="1,0.4")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--schedule", default="auto", help="of elche")
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    quota = asked.quota.split(",")[rank]
    if float(quota) < 1:
        words = [sys.executable, "-m", "benchmarks.throttle", quota]
        held: Any = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        held.stdout.readline()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(SAMPLES * MICRO_BATCHES, LENGTH, WIDTH)
    y = torch.randn_like(x)
    each: list[Any] = [None] * ranks
    dist.all_gather_object(each, layer_times_s(x[:SAMPLES].clone()))
    planned = PlannedTime()
    logging.getLogger(PLAN).addHandler(planned)
    logging.getLogger(PLAN).setLevel(logging.INFO)
    steps: dict[str, Callable[[], object]] = {}
    for name in TORCH_CONTENDERS:
        placement = torch_placement(name, ranks)
        sizes = split_by_hand(placement, each)
        stages = torch_stages(layers(), sizes, placement, rank)
        made = torch_schedule(name, stages, MICRO_BATCHES)
        batch = (x,) if placement[0] == rank else ()
        target = y if placement[-1] == rank else None
        label = f"{name} by hand, layers {sizes} on {placement}"
        steps[label] = lambda m=made, b=batch, t=target: m.step(*b, target=t)
    with Pipeline(
        layers(),
        F.mse_loss,
        micro_batches=MICRO_BATCHES,
        schedule=asked.schedule,
        costs="measure",
        sample=x[:SAMPLES],
    ) as pipe:
        steps["elche"] = lambda: pipe.step(x, y)
        times_s: dict[str, list[float]] = {name: [] for name in steps}
        for repetition in range(2 + asked.repetitions):
            for name in steps if repetition % 2 else [*steps][::-1]:
                spent_s = step_s(steps[name])
                times_s[name] += [spent_s] if repetition > 1 else []
    if rank == 0:
        for name, found in times_s.items():
            print(
                f"{median(found):.3f} s ({min(found):.3f} to {max(found):.3f})  {name}"
            )
        print(f"predicted {planned.predicted_s:.3f} s for elche")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
