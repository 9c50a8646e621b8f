"""A small net with BatchNorm, trained by hand on parts of a batch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

import elche
from elche.comm.norm.sync_batch_norm import (
    convert_sync_batchnorm,
)
from tests.distributed.cases.tasks import Task
from tests.distributed.cases.tasks import build as build_task
from tests.harness.settings import nested

State = dict[str, torch.Tensor]


def train_with_setup(task: Task, convert_at: int | None = None) -> State:
    """A task in which `elche.setup` divides the batches, on converted layers.

    They are before, or after so many batches.
    """
    model, optimizer, loader = build_task(task)
    if convert_at is None:
        convert_sync_batchnorm(model)
    options = {"policy": "sync", **task.options}
    model, optimizer, loader = elche.setup(model, optimizer, loader, **nested(options))
    if convert_at == 0:
        convert_sync_batchnorm(model)
    for _ in range(task.epochs):
        for number, (x, y, *_) in enumerate(loader, 1):
            F.cross_entropy(model(x), y).backward()
            if convert_at == number:
                convert_sync_batchnorm(model)
            optimizer.step()
            optimizer.zero_grad()
    elche.shutdown()
    return copy.deepcopy(model.state_dict())
