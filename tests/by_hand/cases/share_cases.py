"""Loops without a loader whose batches `elche.share` divides, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from elche.by_hand import replica as replica_room
from elche.by_hand.replica import Replica, init_group
from elche.cadence.call_shares import CallShares
from elche.ddp.reduction import WeightedReduction
from elche.ddp.wrapper import DistributedDataParallel
from elche.errors import ConfigError, ProtocolError
from elche.session import sharing
from elche.session.process import process, shutdown
from tests.ddp.cases.ddp_cases import torch_world
from tests.harness.rank_main import this_place

Result = tuple[list[int], dict[str, torch.Tensor]]
SPEEDS = 1.0, 0.25


def slowed(function: Callable[..., Any], now_s: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        now_s[0] += 0.5
        return function(*arguments, **options)

    return call


def by_share(kind: str, steps: int, n: int) -> Result:
    """Trains on this rank's parts, or ``alone``; returns their sizes and the model."""
    torch.manual_seed(4)
    model: nn.Module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    wrapped, replica = model.double(), None
    batches, now_s = torch.randn(steps, n, 3, dtype=torch.float64), [0.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = []
    with ExitStack() as stack:
        # Time passes only by training, and by half a second in each reduction.
        for place, name in ((replica_room, "announce"), (WeightedReduction, "reduce")):
            waits = slowed(getattr(place, name), now_s)
            stack.enter_context(patch.object(place, name, waits))
        stack.enter_context(patch.object(sharing, "clock_s", lambda: now_s[0]))
        stack.callback(setattr, process, "shares", CallShares(0, 1))
        if kind == "ddp":
            stack.enter_context(torch_world())
            wrapped = DistributedDataParallel(model)
        elif kind == "replica":
            stack.callback(shutdown)
            replica = Replica.wrap(model, init_group(timeout_s=60.0))
        for x in batches:
            x = x[sharing.share(n)]
            sizes.append(len(x))
            if kind != "alone":
                now_s[0] += 0.01 + len(x) * 1e-3 / SPEEDS[this_place().rank]
            optimizer.zero_grad()
            (wrapped(x) - x[:, :2].sin()).square().mean().backward()
            if replica is not None:
                replica.weighted_all_reduce_gradients(len(x))
            optimizer.step()
    return sizes, {name: value.clone() for name, value in model.state_dict().items()}


def refused(kind: str, has_other_n: bool) -> str:
    """The message for ranks that call `share` differently."""
    model = nn.Linear(2, 2)
    with ExitStack() as stack:
        stack.callback(setattr, process, "shares", CallShares(0, 1))
        if kind == "ddp":
            stack.enter_context(torch_world())
            model = DistributedDataParallel(model)
        else:
            stack.callback(shutdown)
            replica = Replica.wrap(model, init_group(timeout_s=60.0))
        if has_other_n or this_place().rank:
            sharing.share(8 + this_place().rank)
        try:
            model(torch.ones(4, 2)).sum().backward()
            if kind == "replica":
                replica.weighted_all_reduce_gradients(4)
        except ProtocolError as error:
            return str(error)
    return "nothing"


def unweighted(wraps: bool) -> str:
    """The message where nothing weights the gradients of unequal parts."""
    process.weighs_gradients = False
    try:
        group = init_group(timeout_s=60.0)
        sizes = [len(sharing.share(8)) for _ in range(3)]
        assert sizes == [4] * 3
        if wraps:
            replica = Replica.wrap(nn.Linear(2, 2), group)
            replica.all_reduce_gradients()
            sharing.share(9)
            replica.weighted_all_reduce_gradients(1.0)
            replica.all_reduce_gradients()
        sharing.share(9)
    except ConfigError as error:
        return str(error)
    finally:
        shutdown()
    return "nothing"
