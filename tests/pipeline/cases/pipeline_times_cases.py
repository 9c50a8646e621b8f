"""Pipelines with made-up times of their steps, and one with a rank that stalls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from elche.pipeline.pipeline import Pipeline
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import (
    CALM,
    MODELS,
    Work,
    data_for,
    loss_of,
)

SLOW_RANK = 1
Partition = tuple[int, ...]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def slowed(
    partitions: Sequence[Partition], steps: int
) -> tuple[dict[str, torch.Tensor], list[Partition], list[str]]:
    """Trains under each partition in turn, with the state of the one before.

    Layers take 10 ms by what the ranks report, three times as long on one of them.

    Returns:
        State of the model on rank 0, the partition of each step, and what was logged.
    """
    rank, step = this_place().rank, 0
    logger, lines = logging.getLogger("elche.pipeline.step.measured_steps"), _Lines()
    logger.addHandler(lines)
    level = logger.level
    logger.setLevel(logging.INFO)
    ran: list[Partition] = []
    state: Any = None
    for partition in partitions:
        torch.manual_seed(5)
        layers = [layer.double() for layer in MODELS["mlp"]()]
        with Pipeline(
            *(layers, loss_of),
            micro_batches=4,
            schedule="1f1b",
            partition=partition,
            **CALM,
        ) as pipe:

            def report(
                trace: Any, waited: Any, pipe: Pipeline = pipe
            ) -> list[list[float]]:
                each_s = 0.03 if rank == SLOW_RANK else 0.01
                times = [(one, each_s * pipe.partition[one]) for one in pipe.stages]
                return [[one, took, 0.0, took, took] for one, took in times]

            pipe._stepping._times.report = report  # type: ignore[method-assign]
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01, eps=1e-3)
            if state is not None:
                pipe.load_state_dict(state[0])
                pipe.load_optimizer_state_dict(optimizer, state[1])
            for _ in range(steps):
                pipe.zero_grad()
                pipe.step(*data_for(Work(), step))
                optimizer.step()
                ran.append(pipe.partition)
                step += 1
            state = pipe.state_dict(), pipe.optimizer_state_dict(optimizer)
    logger.removeHandler(lines)
    logger.setLevel(level)
    return state[0] if rank == 0 else {}, ran, lines.lines
