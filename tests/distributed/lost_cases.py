"""Loops under ``sync`` in which one sample's loss is no number."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

import elche
from elche.errors import NonFiniteError
from tests.distributed.cases import Task, build

Ended = tuple[str, int | None, tuple[tuple[int, int], ...], int]


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
