"""What ranks do with replicas by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from elche.by_hand.replica import Replica, init_group
from elche.session.process import process, shutdown

State = dict[str, torch.Tensor]


def net(width: int = 4, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small net, other values at every call."""
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype)


def state_of(*models: nn.Module) -> State:
    """All tensors of some models."""
    return {
        f"{index}.{name}": value.detach().clone()
        for index, model in enumerate(models)
        for name, value in model.state_dict().items()
    }


def gan(rank: int, counts: Sequence[int], steps: int, replicated: bool) -> State:
    """Two models that train each other; a rank's part of the data, or all of it."""
    torch.manual_seed(2 + rank)
    generator, critic = net(5), nn.Linear(2, 1).double()
    if replicated:
        group = init_group(timeout_s=60.0)
        replicas = {
            "generator": Replica.wrap(generator, group, name="generator"),
            "critic": Replica.wrap(critic, group, name="critic"),
        }
    optimizers = {
        "generator": torch.optim.Adam(generator.parameters(), lr=1e-2),
        "critic": torch.optim.SGD(critic.parameters(), lr=1e-1),
    }
    data = torch.randn(
        steps, sum(counts), 3, generator=torch.Generator().manual_seed(1)
    ).double()

    def step(name: str, loss: torch.Tensor) -> None:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        if replicated:
            replicas[name].weighted_all_reduce_gradients(counts)
        optimizers[name].step()

    for number, x in enumerate(data):
        part = x.split(list(counts))[rank] if replicated else x
        real = part[:, :2] * 2.0 + 1.0
        for _ in range(2):
            fake = generator(part).detach()
            step("critic", (critic(fake) - critic(real)).tanh().mean())
        if number % 2:
            step("generator", -critic(generator(part)).tanh().mean())
    state = state_of(generator, critic)
    if replicated:
        for replica in replicas.values():
            replica.check_equal()
        shutdown()
    return state


def gan_on_this_rank(counts: Sequence[int], steps: int) -> State:
    return gan(int(os.environ["RANK"]), counts, steps, replicated=True)


def _in_group(case: Callable[[Any], Any], **options: Any) -> Any:
    group = init_group(**{"timeout_s": 60.0, **options})
    try:
        return case(group)
    finally:
        shutdown()


def plain_and_weighted_means(dtype: str, transport: str) -> list[State]:
    """Gradients (rank + 1) everywhere, reduced in several ways."""

    def case(group: Any) -> list[State]:
        kind = getattr(torch, dtype)
        model = net(dtype=kind)
        model.add_module("unused", nn.Linear(2, 2).to(kind))
        model.add_module("sometimes", nn.Linear(2, 2).to(kind))
        replica = Replica.wrap(model)
        found = []
        world_size, rank = group.world_size, group.rank
        counts = [3.0, 1.0, 0.0][:world_size]
        calls: list[Callable[[], None]] = [
            replica.all_reduce_gradients,
            lambda: replica.weighted_all_reduce_gradients(counts),
            lambda: replica.weighted_all_reduce_gradients(counts[rank]),
        ]
        for call in calls:
            for name, parameter in model.named_parameters():
                if "unused" in name or ("sometimes" in name and rank != 0):
                    parameter.grad = None
                else:
                    parameter.grad = torch.full_like(parameter, rank + 1.0)
                    if counts[rank] == 0.0 and call is not calls[0]:
                        parameter.grad.fill_(float("nan"))
            kept = model[0].weight.grad
            call()
            assert model[0].weight.grad is kept
            found.append(
                {
                    name: torch.empty(0) if p.grad is None else p.grad.clone()
                    for name, p in model.named_parameters()
                }
            )
        return found

    found: list[State] = _in_group(case, transport=transport)
    return found


class WithBuffers(nn.Module):
    """Buffers of every kind."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("fine", torch.full((2, 2), rank + 0.5).double())
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("count", torch.tensor(10 + rank))
        self.register_buffer("flags", torch.tensor([rank == 0, True]))
        self.register_buffer("empty", torch.empty(0))


def sync_all_buffers() -> list[State]:
    """What buffers are after wrapping, after a mean and after taking the first's."""

    def case(group: Any) -> list[State]:
        model = WithBuffers(group.rank)
        replica = Replica.wrap(model)
        found = [state_of(model)]
        for rule in ("mean", "first"):
            model.load_state_dict(WithBuffers(group.rank).state_dict())
            replica.sync_buffers(rule)
            found.append(state_of(model))
        return found

    found: list[State] = _in_group(case)
    return found


def grow_and_freeze() -> list[State]:
    """Progressive training: another layer, then the first one frozen."""

    def case(group: Any) -> list[State]:
        torch.manual_seed(group.rank)
        model = nn.Sequential(nn.Linear(3, 3)).double()
        replica = Replica.wrap(model)
        found = []
        for stage in range(4):
            if stage == 2:
                model.append(nn.Linear(3, 3).double())
                replica.sync_params()
            if stage == 3:
                model[0].requires_grad_(False)
                model.zero_grad()
            (model(torch.ones(2, 3).double() * (group.rank + 1))).sum().backward()
            replica.all_reduce_gradients()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            model.zero_grad()
            replica.check_equal()
            found.append(state_of(model))
            if stage == 0 and group.rank == 1:
                # An equal layer of its own: the other ranks have to follow that.
                model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        return found

    found: list[State] = _in_group(case)
    return found


def said_by(wrong: str) -> str:
    """The error that a mistake brings on this rank."""
    own_s = float(os.environ["RANK"]) if wrong == "settings" else 0.0
    try:
        _in_group(partial(_wrong, wrong), timeout_s=60.0 + own_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _wrong(wrong: str, group: Any) -> None:
    last = group.rank == group.world_size - 1
    if wrong == "shape":
        Replica.wrap(net(5 if last else 4))
    model = net()
    one = Replica.wrap(model, name="one")
    other = Replica.wrap(net(), name="other")
    if wrong == "order":
        (other if last else one).all_reduce_gradients()
    elif wrong == "call":
        (one.sync_buffers if last else one.sync_params)()
    elif wrong == "counts":
        one.weighted_all_reduce_gradients([1, 2, 3 + last][-group.world_size :])
    elif wrong == "no sum":
        one.weighted_all_reduce_gradients(1.7e308)
    elif wrong == "own zero":
        one.weighted_all_reduce_gradients(0)
    elif wrong == "frozen":
        model[0].bias.requires_grad_(not last)
        one.all_reduce_gradients()
    elif wrong == "converted buffer":
        model.register_buffer("mean", torch.zeros(4))
        one.sync_buffers()
        model.mean = torch.zeros(4, dtype=torch.float64 if last else torch.float32)
        one.sync_buffers()
    elif wrong == "values":
        with torch.no_grad():
            model[2].bias += float(last)
        one.check_equal()
    elif wrong == "second name":
        if last:
            init_group(timeout_s=50.0)
        run = process.manual
        assert run is not None
        assert init_group() is group
        run.barrier()
        raise RuntimeError("passed")
