"""Predicted against measured steps of pipelines whose layers are measured first.

    elche run --nproc 2 benchmarks/pipeline_plans.py --model lstm
    elche run --nproc 3 benchmarks/pipeline_plans.py --model convolution --layers 12

The prediction is made from single layers and messages before the first step
(``costs="measure"``), so it is foresight; what it leaves out are the loss and the
exchanges at a step's ends. Beside it stands what the planner predicts once it has timed
the stages of three steps, as it does before it plans anew, and, to show how far the
machine itself wanders, the later steps over those three. One thread per rank, and a
core for each, or it measures the machine's scheduler. Prints the plan, the share of the
weight gradients that is put off, the median of the steps, and these ratios for each of
`--repetitions` pipelines.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.pipeline import Pipeline
from elche.schedule.costs import PipelineCosts
from elche.schedule.generators.schedules import FIXED_SCHEDULES
from elche.schedule.timing import simulate

MICRO_BATCHES, WARM_STEPS = 8, 5


class Recurrent(nn.Module):
    """An LSTM over a sequence, added to what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences [samples, length, width] to such sequences."""
        found: torch.Tensor = x + self.cell(x)[0]
        return found


class Residual(nn.Module):
    """Two convolutions, added to what they read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [samples, width, height, breadth] to such images."""
        found: torch.Tensor = x + self.body(x)
        return found


def attention(width: int) -> nn.Module:
    """A transformer block."""
    return nn.TransformerEncoderLayer(
        width, 4, 4 * width, 0.0, batch_first=True, norm_first=True
    )


MODELS: dict[str, tuple[Callable[[int], nn.Module], int, tuple[int, ...]]] = {
    "lstm": (Recurrent, 192, (32, 192)),
    "convolution": (Residual, 48, (48, 24, 24)),
    "attention": (attention, 192, (96, 192)),
}
"""Of each: a layer, its width, and the form of a sample."""


def measure(model: str, schedule: str, layers: int, steps: int) -> dict[str, Any]:
    """Makes a pipeline of measured layers, and trains some steps; on every rank."""
    make, width, form = MODELS[model]
    torch.manual_seed(0)
    x = torch.randn(4 * MICRO_BATCHES, *form)
    with Pipeline(
        [lambda: make(width)] * layers,
        F.mse_loss,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        costs="measure",
        sample=x[:4],
        replan_every=0,
    ) as pipe:
        costs = pipe.config.costs
        assert isinstance(costs, PipelineCosts)
        predicted_s = simulate(pipe.schedule, costs).makespan
        took_s = []
        for _ in range(WARM_STEPS + steps):
            pipe.zero_grad()
            began_s = time.perf_counter()
            pipe.step(x, x)
            took_s.append(time.perf_counter() - began_s)
        step_s = median(took_s[WARM_STEPS:])
        forecast = pipe._changes.planner.forecast  # of the third to fifth step's times
        assert forecast is not None
        return {
            "schedule": pipe.schedule.name,
            "partition": list(pipe.partition),
            "weight_share": _weight_share(costs),
            "predicted_ms": 1e3 * predicted_s,
            "measured_ms": 1e3 * step_s,
            "ratio": step_s / predicted_s,
            "ratio_after_steps": step_s / forecast.makespan_s,
            "ratio_of_steps": step_s / median(took_s[2:WARM_STEPS]),
            "rank": pipe.rank,
        }


def _weight_share(costs: PipelineCosts) -> float:
    """The part of the backward's time that the plan puts off."""
    weights = sum(one.weight_gradient for one in costs.stages)
    return weights / (weights + sum(one.input_gradient for one in costs.stages))


def main() -> None:
    """Measures and prints, on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="lstm")
    parser.add_argument(
        "--schedule", choices=(*FIXED_SCHEDULES, "auto"), default="auto"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for _ in range(asked.repetitions):
        row = measure(asked.model, asked.schedule, asked.layers, asked.steps)
        rows.append(row)
        if row["rank"] == 0:
            print(
                f"{asked.model}: {row['schedule']} {row['partition']}, W "
                f"{row['weight_share']:.2f} of the backward; predicted "
                f"{row['predicted_ms']:.1f} ms, measured {row['measured_ms']:.1f} ms: "
                f"{row['ratio']:.3f}, {row['ratio_after_steps']:.3f} of what was "
                f"predicted after three steps, {row['ratio_of_steps']:.3f} of those",
                flush=True,
            )
    if asked.json is not None and rows[0]["rank"] == 0:
        asked.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
