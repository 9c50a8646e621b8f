"""Loops in which some samples' loss is no number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import elche
from elche.errors import NonFiniteError
from tests.distributed.cases.tasks import Task, begin, state_of
from tests.harness.logged import logged

Ended = tuple[str, int | None, tuple[tuple[int, int], ...], int]


def train_to_the_end(task: Task, bad: int, loop: str) -> Ended:
    """How the run ended: what was said, whose batches, and after how many steps."""
    model, optimizer, loader = begin(task, **task.options)
    steps, ended = 0, ("", None, ())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    try:
        for _ in range(task.epochs):
            for x, y, index, _ in loader:
                steps += 1
                loss = F.cross_entropy(model(x), y)
                if bad in index.tolist():
                    loss = loss * float("nan")
                if loop == "scaler":
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    continue
                loss.backward()
                if loop == "accumulates" and steps % 3:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                if loop == "breaks" and steps == 6:
                    break
            elche.barrier()
    except NonFiniteError as error:
        ended = str(error), error.rank, error.batches
    assert all(bool(p.isfinite().all()) for p in model.parameters()) != bool(ended[0])
    elche.shutdown()
    return (*ended, steps)


@dataclass
class Survived:
    """What a rank holds after windows with bad samples; metrics are of the last epoch.

    ``discarded`` is what it said of updates of its own.
    """

    ended: tuple[str, int | None, tuple[tuple[int, int], ...]]
    order: list[int]
    metrics: elche.monitor.EpochMetrics | None
    progress: float
    values: dict[str, torch.Tensor]
    discarded: list[str]


class _Steps:
    """Steps of a loop, in its variants.

    The common parameters overflow in the step of a window, or in an outer step, where
    asked; and where rank 1 is broken, none of its losses is a number.
    """

    def __init__(self, loop: str, optimizer: torch.optim.Optimizer) -> None:
        self.loop, self.optimizer = loop, optimizer
        self.is_broken = loop == "rank 1 is broken" and elche.rank() == 1
        if loop == "overflows":
            optimizer.param_groups[0]["lr"] = 1e38
        enabled = loop == "scaler"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)

    def step(self, loss: torch.Tensor, *, is_bad: bool, at: int) -> None:
        """A batch; ``at`` counts those since the last step, 0 where one is due."""
        if self.loop == "overflows":
            loss = loss * 1e6
        if is_bad or self.is_broken:
            loss = loss * float("nan")
        self.scaler.scale(loss).backward()
        if at:
            return
        self.scaler.step(self.optimizer)
        if self.loop == "leaps":
            for group in self.optimizer.param_groups:
                torch._foreach_add_([p.detach() for p in group["params"]], 100.0)
        self.optimizer.zero_grad()
        self.scaler.update()


def train_through_bad_samples(
    task: Task, bad: tuple[int, ...], loop: str, accumulated: int = 1
) -> Survived:
    """Epochs under windows, in which the loss of some samples is no number."""
    model, optimizer, loader = begin(task, **task.options)
    steps = _Steps(loop, optimizer)
    order: list[int] = []
    ended: tuple[str, int | None, tuple[tuple[int, int], ...]] = ("", None, ())
    with logged("elche") as lines:
        try:
            for _ in range(task.epochs):
                for x, y, index, _ in loader:
                    order += index.tolist()
                    at = len(order) // task.batch_size % accumulated
                    is_bad = bool(set(bad) & set(index.tolist()))
                    steps.step(F.cross_entropy(model(x), y), is_bad=is_bad, at=at)
        except NonFiniteError as error:
            ended = str(error), error.rank, error.batches
    values = state_of(model)
    for at, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                values[f"{at} {name}"] = value.clone()
    metrics = None if ended[0] else elche.epoch_metrics()
    progress = 0.0 if ended[0] else elche.progress_samples()
    elche.shutdown()
    discarded = [line for line in lines if "and is discarded" in line]
    return Survived(ended, order, metrics, progress, values, discarded)
