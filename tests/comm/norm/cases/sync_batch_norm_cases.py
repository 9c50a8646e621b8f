"""A small net with BatchNorm, trained by hand on parts of a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import elche
from elche.by_hand.manual_run import end_manual_run
from elche.by_hand.replica import Replica, init_group
from elche.comm.norm.sync_batch_norm import (
    convert_sync_batchnorm,
    sync_batchnorm_layers,
)
from elche.comm.transport.exchange import GlooExchange, SharedExchange
from elche.runtime.process import worker
from tests.distributed.cases.tasks import Task
from tests.distributed.cases.tasks import build as build_task
from tests.distributed.patience import lose_patience
from tests.harness.settings import nested

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Convolutions with BatchNorm, perhaps recomputed in the backward pass."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Tanh())
        self.head = nn.Sequential(
            nn.Flatten(1), nn.Linear(64, 5), nn.BatchNorm1d(5, momentum=None)
        )
        self._recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.second):
            x = checkpoint(part, x, use_reentrant=False) if self._recompute else part(x)
        out: torch.Tensor = self.head(x)
        return out


def build(recompute: bool = False) -> nn.Module:
    """The net, the same at every call."""
    torch.manual_seed(5)
    return Net(recompute).double()


def batches(steps: int, samples: int) -> torch.Tensor:
    """What is trained on: steps of global batches."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(steps, samples, 2, 8, 8, generator=generator).double()


def train_alone(steps: int, samples: int) -> State:
    """One process on the union batch, with torch's own BatchNorm."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for x in batches(steps, samples):
        _loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _state(model)


def train_shared(
    sizes: Sequence[Sequence[int]], transport: str, recompute: bool
) -> State:
    """This rank's part of it: in step s, rank r has ``sizes[s][r]`` samples."""
    group = init_group(timeout_s=60.0, transport=transport)
    model = convert_sync_batchnorm(build(recompute))
    replica = Replica.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for x, counts in zip(batches(len(sizes), sum(sizes[0])), sizes, strict=True):
        part = x.split(list(counts))[group.rank]
        loss = _loss(model, part) if len(part) else model(part).sum()
        loss.backward()
        replica.weighted_all_reduce_gradients(counts)
        optimizer.step()
        optimizer.zero_grad()
    replica.check_equal()
    expected = SharedExchange if transport == "auto" else GlooExchange
    for layer in sync_batchnorm_layers(model).values():
        exchanges = layer.scope._exchanges.values()
        assert exchanges
        assert all(isinstance(each, expected) for each in exchanges)
    state = _state(model)
    model.eval()
    state["evaluated"] = model(batches(1, 4)[0]).detach()
    end_manual_run()
    return state


def hang_without_one_rank(steps_before: int) -> str:
    """The last rank calls the layer no more; the others' error."""
    group = init_group(timeout_s=60.0)
    model = convert_sync_batchnorm(build())
    Replica.wrap(model)
    said = ""
    for _ in range(steps_before):
        model(batches(1, 4)[0])
    elche.barrier()
    lose_patience(group, 1.0)
    reason_within_s, worker.ABORT_WAIT_S = worker.ABORT_WAIT_S, 0.5  # there is none
    if group.rank < group.world_size - 1:
        try:
            model(batches(1, 4)[0])
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    end_manual_run()
    worker.ABORT_WAIT_S = reason_within_s
    return said


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return (out - torch.cos(9.0 * x.flatten(1)[:, :5])).square().mean()


def _state(model: nn.Module) -> State:
    state = copy.deepcopy(model.state_dict())
    model.eval()
    state["evaluated"] = model(batches(1, 4)[0]).detach()
    model.train()
    return state


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
