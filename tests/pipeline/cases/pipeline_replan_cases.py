"""Pipelines whose times drift, and one with a rank that stalls in a step."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.moving import replanning
from elche.pipeline.pipeline import Pipeline
from elche.schedule.formats import to_text
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import (
    CALM,
    WIDTH,
    Work,
    data_for,
    hang,
    lose_patience,
    loss_of,
)
from tests.pipeline.cases.pipeline_move_cases import first_layers, optimizer_of
from tests.pipeline.setup.cases.profiling_cases import Delay, batch, virtual_time

STEPS, DRIFT_STEP = 14, 6


@dataclass(frozen=True)
class DriftWork:
    """A run whose measured times are made up: 10 ms per layer, F, I and W alike.

    Attributes:
        schedule: of the pipeline.
        slow_stages: of rank 0's stages, which take `factor` times as long later...
        slow_rank: ...or this rank, all of its stages.
        factor: how much longer.
        jitter: share by which every time varies.
        options: of the pipeline.
        registers: whether the optimizer is registered.
        payback_steps: in which a move must be won back.
    """

    schedule: str = "auto"
    slow_stages: tuple[int, ...] = ()
    slow_rank: int | None = None
    factor: float = 1.0
    jitter: float = 0.1
    options: tuple[tuple[str, Any], ...] = ()
    registers: bool = False
    payback_steps: int = replanning.PAYBACK_STEPS


@dataclass
class Drifted:
    """What a rank saw.

    Attributes:
        plans: of each step, the schedule's name and text.
        partitions: of each step.
        log: what was said about the plan.
        state: of the model, on rank 0.
    """

    plans: list[tuple[str, str]]
    partitions: list[tuple[int, ...]]
    log: list[str]
    state: dict[str, torch.Tensor]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def drifted(given: DriftWork) -> Drifted:
    """The run on one rank."""
    rank = this_place().rank
    drawn = random.Random(rank)
    logger, lines = logging.getLogger("elche.pipeline"), _Lines()
    logger.addHandler(lines)
    level = logger.level
    logger.setLevel(logging.INFO)
    plans, partitions = [], []
    before, replanning.PAYBACK_STEPS = replanning.PAYBACK_STEPS, given.payback_steps
    with Pipeline(
        first_layers("mlp"),
        loss_of,
        micro_batches=4,
        schedule=given.schedule,
        **{"replan_every": 2, **CALM, **dict(given.options)},
    ) as pipe:
        step = 0

        def report(trace: Sequence[Any], waited: Sequence[float]) -> list[Any]:
            rows = []
            for stage in pipe.stages:
                slow = stage in given.slow_stages or rank == given.slow_rank
                each = 0.01 * pipe.partition[stage]
                each *= given.factor if slow and step >= DRIFT_STEP else 1.0
                f, i, w = (
                    each * drawn.uniform(1 - given.jitter, 1 + given.jitter)
                    for _ in range(3)
                )
                rows.append([stage, f, 0.0, i, w])
            return rows

        pipe._changes.planner.report = report
        optimizer = optimizer_of("sgd", pipe.named_parameters())
        if given.registers:
            pipe.register_optimizer(optimizer)
        for step in range(STEPS):
            pipe.zero_grad()
            x, y = data_for(Work(), step)
            pipe.step(x, y)
            optimizer.step()
            plans.append((pipe.schedule.name, to_text(pipe.schedule)))
            partitions.append(pipe.partition)
        state = pipe.local_state_dict() if pipe.num_replicas > 1 else pipe.state_dict(0)
    replanning.PAYBACK_STEPS = before
    logger.removeHandler(lines)
    logger.setLevel(level)
    return Drifted(plans, partitions, lines.lines, state)


class Throttled(nn.Module):
    """A layer whose device can be made slower; all of a process at once."""

    seconds = 0.002

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Delay.apply(torch.tanh(self.linear(x)), Throttled.seconds)


def throttled(by_itself: bool) -> tuple[list[int], list[tuple[int, ...]], bool]:
    """Rank 1 becomes ten times slower; its layers before and after, and the losses.

    Args:
        by_itself: layers move without being asked.
    """
    with virtual_time():
        return _throttled(by_itself)


def _throttled(by_itself: bool) -> tuple[list[int], list[tuple[int, ...]], bool]:
    rank = this_place().rank
    torch.manual_seed(3)
    layers = [Throttled().double() for _ in range(8)]
    x, y = batch()
    Throttled.seconds = 0.002
    options: dict[str, Any] = dict(CALM)
    if by_itself:
        options |= {"auto_repartition": True, "replan_every": 2}
    with Pipeline(
        layers,
        F.mse_loss,
        micro_batches=4,
        schedule="1f1b",
        costs="measure",
        sample=x[: len(x) // 4],
        **options,
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.register_optimizer(optimizer)
        counts, partitions, learns = [], [], True
        loss = float("inf")
        for step in range(16 if by_itself else 6):
            if step == 3:
                counts.append(len(pipe.layers))
                Throttled.seconds = 0.02 if rank == 1 else 0.002
            if step == 5 and not by_itself:
                pipe.repartition()
            pipe.zero_grad()
            found = pipe.step(x, y).loss
            optimizer.step()
            learns, loss = learns and found < loss, found
            partitions.append(pipe.partition)
        counts.append(len(pipe.layers))
        Throttled.seconds = 0.002
        return counts, partitions, learns


class Stalling(nn.Module):
    """A layer that stops in the third microbatch of one step."""

    def __init__(self, stalls_at: int) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.stalls_at = stalls_at
        self.calls = 0
        self.pipe: Pipeline | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4 * self.stalls_at + 3:
            hang(self.pipe)
        return self.body(x)


def stalled(rank: int, step: int) -> tuple[int, str]:
    """A rank stops in a step: how many went well here, and how it ended."""
    place = this_place()
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(place.world_size)]
    layers[rank] = middle = Stalling(step if place.rank == rank else 10**6)
    x, y = torch.randn(8, WIDTH), torch.randint(3, (8,))
    with Pipeline(
        layers,
        loss_of,
        micro_batches=4,
        schedule="zb-h1",
        **{**CALM, "timeout_s": 1000.0},
    ) as pipe:
        middle.pipe = pipe
        for number in range(step + 1):
            if number == step:
                lose_patience(pipe, 3.0)
            try:
                pipe.step(x, y)
            except Exception as error:
                return number, f"{type(error).__name__}: {error}"
    return step + 1, ""
