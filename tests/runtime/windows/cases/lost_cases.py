"""Loops in which some samples' loss is no number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import elche
from elche.errors import NonFiniteError
from tests.distributed.cases.tasks import Task, build
from tests.harness.logged import logged
from tests.harness.settings import nested

Ended = tuple[str, int | None, tuple[tuple[int, int], ...], int]


class TwoParts(nn.Module):
    """Two networks that share nothing, as a generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.second = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def train_several_passes(task: Task, bad: int, loop: str) -> Ended:
    """Steps of two losses, of which only the first is no number for a bad sample."""
    _, _, loader = build(task)
    model: nn.Module = TwoParts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, **nested(task.options)
    )
    steps, ended = 0, ("", None, ())
    try:
        for x, y, index, _ in loader:
            steps += 1
            one, other = model(x)
            if loop == "one pass, the part that is run last":
                one, other = other, one
            loss = F.cross_entropy(one, y)
            if bad in index.tolist():
                loss = loss * float("nan")
            more = F.cross_entropy(other, y)
            if loop.startswith("one pass"):
                (loss + more).backward()
            elif loop == "two passes through all":
                loss.backward(retain_graph=True)
                (more + one.square().mean()).backward()
            else:
                loss.backward()
                more.backward()
            optimizer.step()
            optimizer.zero_grad()
        elche.barrier()
    except NonFiniteError as error:
        ended = str(error), error.rank, error.batches
    elche.shutdown()
    return (*ended, steps)


def train_to_the_end(task: Task, bad: int, loop: str) -> Ended:
    """How the run ended: what was said, whose batches, and after how many steps."""
    model, optimizer, loader = build(task)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, **nested(task.options)
    )
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
    """What a rank holds after epochs of windows with bad samples.

    Attributes:
        ended: what the run ended with, "" if it did not; the rank and batches named.
        order: samples that this rank has trained on.
        metrics: of the last epoch, None where the run ended.
        progress: of the run, in samples.
        values: of the model and both optimizers' states.
        discarded: what this rank said of updates of its own.
    """

    ended: tuple[str, int | None, tuple[tuple[int, int], ...]]
    order: list[int]
    metrics: elche.monitor.EpochMetrics | None
    progress: float
    values: dict[str, torch.Tensor]
    discarded: list[str]


class _Steps:
    """Steps of a loop, in its variants.

    Two optimizers step the model where asked; the common parameters overflow in the
    step of a window, or in an outer step, where asked; and where rank 1 is broken, none
    of its losses is a number.
    """

    def __init__(
        self, loop: str, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.loop = loop
        self.is_broken = loop == "rank 1 is broken" and elche.rank() == 1
        self.optimizers = [optimizer]
        if loop == "two optimizers":
            last = list(model.parameters())[2:]
            self.optimizers.append(torch.optim.AdamW(last, lr=1e-2))
        if loop == "overflows":
            optimizer.param_groups[0]["lr"] = 1e38
        enabled = loop == "scaler"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)

    def step(self, loss: torch.Tensor, *, is_bad: bool, at: int) -> None:
        """A batch; ``at`` counts those since the last step, 0 where one is due."""
        if self.loop == "zeroes first" and at == 1:
            self.optimizers[0].zero_grad()
        if self.loop == "overflows":
            loss = loss * 1e6
        if is_bad or self.is_broken:
            loss = loss * float("nan")
        self.scaler.scale(loss).backward()
        if at:
            return
        for each in self.optimizers:
            self.scaler.step(each)
            if self.loop == "leaps":
                for group in each.param_groups:
                    torch._foreach_add_([p.detach() for p in group["params"]], 100.0)
            if self.loop != "zeroes first":
                each.zero_grad()
        self.scaler.update()


def train_through_bad_samples(
    task: Task, bad: tuple[int, ...], loop: str, accumulated: int = 1
) -> Survived:
    """Epochs under windows, in which the loss of some samples is no number."""
    model, optimizer, loader = build(task)
    if loop == "two optimizers":
        first = list(model.parameters())[:2]
        optimizer = torch.optim.SGD(first, lr=0.1, momentum=0.9)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, **nested(task.options)
    )
    steps = _Steps(loop, model, optimizer)
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
    values = {k: v.detach().clone() for k, v in model.state_dict().items()}
    for number, each in enumerate(steps.optimizers):
        for at, state in enumerate(each.state.values()):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    values[f"{number} {at} {name}"] = value.clone()
    metrics = None if ended[0] else elche.epoch_metrics()
    progress = 0.0 if ended[0] else elche.progress_samples()
    elche.shutdown()
    discarded = [line for line in lines if "and is discarded" in line]
    return Survived(ended, order, metrics, progress, values, discarded)
