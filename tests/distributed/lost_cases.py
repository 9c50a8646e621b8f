"""Loops in which some samples' loss is no number."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import elche
from elche import session
from elche.errors import NonFiniteError
from tests.distributed.cases import Task, build

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
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
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
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
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


def leave_at_unequal_steps(task: Task) -> str:
    """Rank 1 leaves after its second batch, rank 0 when it gets the third."""
    model, optimizer, loader = build(task)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
    said = ""
    try:
        for step, (x, y, *_) in enumerate(loader):
            if step == 2:
                break
            F.cross_entropy(model(x), y).backward()
            if step == 1 and os.environ["RANK"] == "1":
                break
            optimizer.step()
            optimizer.zero_grad()
        elche.barrier()
    except elche.ElcheError as error:
        said = str(error)
    elche.shutdown()
    return said


@dataclass
class Survived:
    """What a rank holds after an epoch of windows with bad samples.

    Attributes:
        ended: what the run ended with, "" if it did not; and the batches named.
        left_out: batches that were left out.
        order: samples that this rank has trained on.
        metrics: of the epoch.
        values: of the model and both optimizers' states.
    """

    ended: tuple[str, tuple[tuple[int, int], ...]]
    left_out: list[int]
    order: list[int]
    metrics: elche.EpochMetrics | None
    values: dict[str, torch.Tensor]


def train_through_bad_samples(
    task: Task, bad: tuple[int, ...], loop: str, accumulated: int = 1
) -> Survived:
    """One epoch under windows; two optimizers step the model where asked."""
    model, optimizer, loader = build(task)
    second = None
    if loop == "two optimizers":
        first, last = list(model.parameters())[:2], list(model.parameters())[2:]
        optimizer = torch.optim.SGD(first, lr=0.1, momentum=0.9)
        second = torch.optim.AdamW(last, lr=1e-2)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
    run = session.current_run()
    assert run is not None
    scales = loop == "scaler"
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
    order: list[int] = []
    said: tuple[str, tuple[tuple[int, int], ...]] = ("", ())
    try:
        for x, y, index, _ in loader:
            order += index.tolist()
            at = len(order) // task.batch_size % accumulated
            if loop == "zeroes first" and at == 1:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if set(bad) & set(index.tolist()):
                loss = loss * float("nan")
            scaler.scale(loss).backward()
            if at:
                continue
            if scales:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                continue
            for each in (optimizer, second):
                if each is not None:
                    each.step()
                    if loop != "zeroes first":
                        each.zero_grad()
    except NonFiniteError as error:
        said = str(error), error.batches
    left_out = [b for r in run.reports for part in r.left_out for b in range(*part)]
    values = {k: v.detach().clone() for k, v in model.state_dict().items()}
    for number, each in enumerate((optimizer, second)):
        for at, state in enumerate(each.state.values() if each is not None else ()):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    values[f"{number} {at} {name}"] = value.clone()
    metrics = None if said[0] else elche.epoch_metrics()
    elche.shutdown()
    return Survived(said, left_out, order, metrics, values)


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train_with_a_late_optimizer(
    task: Task, batches: int
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """A second optimizer steps after so many batches on rank 1, and at once elsewhere.

    Returns:
        What was logged of optimizer state, and that of the second optimizer.
    """
    model, _, loader = build(task)
    first, last = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = torch.optim.SGD(first, lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(last, lr=1e-2)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
    begins = batches if os.environ["RANK"] == "1" else 0
    kept, log = _Lines(), logging.getLogger("elche")
    log.addHandler(kept)
    try:
        for number, (x, y, *_) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number >= begins:
                second.step()
            for each in (optimizer, second):
                each.zero_grad()
    finally:
        log.removeHandler(kept)
    elche.shutdown()
    states = {
        f"{n} {k}": v for n, p in enumerate(last) for k, v in second.state[p].items()
    }
    return [line for line in kept.lines if "optimizer state" in line], states
