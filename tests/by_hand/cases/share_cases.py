"""Loops without a loader whose batches `elche.share` divides, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import distributed as dist
from torch import nn

from elche.by_hand.replica import Replica, init_group
from elche.cadence.call_shares import CallShares
from elche.ddp.wrapper import DistributedDataParallel
from elche.session import sharing
from elche.session.process import process, shutdown
from tests.ddp.cases.ddp_cases import torch_world
from tests.harness.rank_main import this_place

Result = tuple[list[int], dict[str, torch.Tensor]]


class Clock:
    """Time (s) that passes only by training."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def virtual_clock() -> Iterator[Clock]:
    clock, real = Clock(), sharing.clock_s
    sharing.clock_s = clock
    try:
        yield clock
    finally:
        sharing.clock_s = real
        process.shares = CallShares(0, 1)


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batches(steps: int, n: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(7)
    return torch.randn(steps, n, 3, generator=draws, dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x[:, :2].sin()).square().mean()
    return loss


def alone(steps: int, n: int) -> dict[str, torch.Tensor]:
    """Trains on whole batches in one process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in batches(steps, n):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    return dict(model.state_dict())


def by_share(kind: str, speeds: list[float], steps: int, n: int) -> Result:
    """Trains on this rank's parts; returns their sizes and the model."""
    model, sizes, rank = net(), [], this_place().rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ExitStack() as stack:
        clock = stack.enter_context(virtual_clock())
        wrapped, replica = model, None
        if kind == "ddp":
            stack.enter_context(torch_world())
            wrapped = DistributedDataParallel(model)
        else:
            stack.callback(shutdown)
            replica = Replica.wrap(model, init_group(timeout_s=60.0))
        for x in batches(steps, n):
            part = sharing.share(n)
            sizes.append(len(part))
            clock.now_s += 0.01 + len(part) * 1e-3 / speeds[rank]
            optimizer.zero_grad()
            loss_of(wrapped, x[part]).backward()
            if replica is not None:
                replica.weighted_all_reduce_gradients(len(part))
            optimizer.step()
        if kind == "ddp":
            dist.barrier()
    return sizes, {name: value.clone() for name, value in model.state_dict().items()}


def refused(kind: str) -> str:
    """The message for ranks that call `share` differently."""
    with ExitStack() as stack:
        stack.enter_context(virtual_clock())
        stack.callback(shutdown)
        model = net()
        replica = Replica.wrap(model, init_group(timeout_s=60.0))
        if kind == "other n":
            sharing.share(8 + this_place().rank)
        elif this_place().rank:
            sharing.share(8)
        try:
            replica.weighted_all_reduce_gradients(4)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"
