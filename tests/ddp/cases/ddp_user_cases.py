"""Scripts as people write them, run with torch's wrapper and with elche's.

Each takes the wrapper's class and returns what it has at the end; batches are equal, so
that both must come to the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elche.ddp.wrapper import DistributedDataParallel
from elche.errors import CommunicationError, MismatchError
from tests.ddp.cases.ddp_cases import FEATURES, build, gradients_of, torch_world
from tests.ddp.cases.ddp_contract_cases import KINDS, data
from tests.harness.rank_main import this_place

Found = dict[str, Any]


def both(script: str) -> tuple[Found, Found]:
    """What this rank has at the end with elche's wrapper and with torch's."""
    with torch_world(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        run = SCRIPTS[script]
        theirs = run(KINDS["torch"])
        return run(KINDS["elche"]), theirs


def end_of(model: nn.Module, *, local: tuple[str, ...] = ()) -> Found:
    """Values and gradients, but for buffers that are each rank's own."""
    values = {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if not name.endswith(local)
    }
    gradients = {f"{n} gradient": g for n, g in gradients_of(model).items()}
    return {**values, **gradients}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loop(
    ddp: nn.Module,
    loss_of: Callable[..., torch.Tensor] | None = None,
    steps: int = 3,
    *,
    set_to_none: bool = True,
) -> None:
    """Plain training; gradients of the last step stay."""
    optimizer = sgd(ddp)
    for step in range(steps):
        x, y = data(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(ddp, x, y) if loss_of else F.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()


def ignored(wrapper: Any) -> Found:
    """A parameter and a buffer that stay each rank's own."""
    model = build("cnn", seed=this_place().rank)
    names = ["5.bias", "2.running_mean"]
    wrapper._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = wrapper(model)
    loop(ddp)
    others = ("var", "tracked") if this_place().rank else ()
    return end_of(model, local=others)


def checkpointed_as_a_whole(wrapper: Any) -> Found:
    model = build("mlp")
    ddp = wrapper(model)
    loop(ddp, lambda m, x, y: F.cross_entropy(checkpoint(m, x, use_reentrant=False), y))
    found = end_of(model)
    with ddp.no_sync():
        x, y = data(7)
        loss = F.cross_entropy(checkpoint(ddp, x, use_reentrant=False), y)
    loss.backward()  # recomputed where gradients are reduced, but meant to stay local
    return {**found, **{f"local {k}": v for k, v in end_of(model).items()}}


class Policy(nn.Module):
    """Keeps its loss beside the distribution that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, 3)
        self.loss = torch.zeros(())

    def forward(self, x: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        hidden = self.body(x).tanh()
        logits = self.head(hidden)
        self.loss = logits.square().mean()
        return Categorical(logits=logits), hidden


def loss_on_the_module(wrapper: Any) -> Found:
    """Backward does not go through what the forward returned."""
    model = Policy().double()
    model.load_state_dict(_filled(model))

    def loss_of(ddp: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ddp(x)
        loss: torch.Tensor = ddp.module.loss
        return loss

    loop(wrapper(model), loss_of)
    return end_of(model)


def _filled(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in model.state_dict().items()
    }


def _fails(*_: Any) -> None:
    raise ZeroDivisionError("a fault in the user's code")


def broken_before_any_gradient(wrapper: Any) -> Found:
    """One rank's backward fails at its beginning, and it goes on with the others."""
    model = build("mlp")
    ddp = wrapper(model)
    x, y = data(0)
    F.cross_entropy(ddp(x), y).backward()
    model.zero_grad()
    if this_place().rank == 1:
        out = ddp(x)
        out.register_hook(_fails)
        with suppress(ZeroDivisionError):
            F.cross_entropy(out, y).backward()
    F.cross_entropy(ddp(x), y).backward()
    return end_of(model)


class Caches(nn.Module):
    """Buffers that are made, and grow, in the first forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", None, persistent=False)
        self.register_buffer("grown", torch.ones(1))
        self.body = nn.Linear(FEATURES, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.grown) < len(x):
            self.grown = torch.ones(len(x), dtype=x.dtype)
            self.made = torch.full((1,), 2.0, dtype=x.dtype)
        out: torch.Tensor = self.norm(self.body(x) * self.grown[: len(x), None])
        return out


def caches(wrapper: Any) -> Found:
    torch.manual_seed(3)
    model = Caches().double()
    ddp = wrapper(model)
    for step in range(4):
        x, y = data(step, 4 + step)
        F.cross_entropy(ddp(x), y).backward()
    ddp.eval()
    ddp(x)
    return end_of(model, local=("mean", "var", "tracked") if this_place().rank else ())


def chained(wrapper: Any) -> Found:
    """Two wrappers in one backward, then one against the other."""
    first, second = build("mlp"), nn.Linear(3, 3).double()
    second.load_state_dict(_filled(second))
    one, other = wrapper(first), wrapper(second)
    optimizers = sgd(one), sgd(other)
    for step in range(2):
        x, y = data(step)
        F.cross_entropy(other(one(x)), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        other(one(x).detach()).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return {**end_of(first), **{f"2 {k}": v for k, v in end_of(second).items()}}


def sampled(wrapper: Any) -> Found:
    """A distributed sampler, accumulation and clipping, as torchrun's scripts have."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(48, FEATURES).double(), torch.arange(48) % 3)
    sampler = DistributedSampler(samples, seed=1)
    model = build("cnn", seed=this_place().rank)
    ddp = wrapper(model)
    optimizer = sgd(ddp)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(DataLoader(samples, 4, sampler=sampler)):
            is_last = number % 2 == 1
            with nullcontext() if is_last else ddp.no_sync():
                F.cross_entropy(ddp(x), y).backward()
            if is_last:
                nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return end_of(model, local=("mean", "var", "tracked") if this_place().rank else ())


def compiled(wrapper: Any) -> Found:
    """`torch.compile` around the wrapper and inside it."""
    model = build("mlp")
    ddp = wrapper(torch.compile(model, backend="aot_eager"))
    outside = torch.compile(wrapper(build("mlp")), backend="aot_eager")
    for step in range(3):
        x, y = data(step)
        with ddp.no_sync() if step == 1 else nullcontext():
            F.cross_entropy(ddp(x), y).backward()
        F.cross_entropy(outside(x), y).backward()
    return {**end_of(model), **{f"o {k}": v for k, v in end_of(outside).items()}}


SCRIPTS: dict[str, Callable[[Any], Found]] = {
    each.__name__: each
    for each in (
        ignored,
        checkpointed_as_a_whole,
        loss_on_the_module,
        broken_before_any_gradient,
        caches,
        chained,
        sampled,
        compiled,
    )
}


def caches_of_other_lengths() -> str:
    """One rank's cache grows, the other's does not."""
    with torch_world():
        torch.manual_seed(3)
        model = Caches().double()
        model.grown = torch.ones(6, dtype=torch.float64)
        ddp = DistributedDataParallel(model)
        x, y = data(0, 5 + 2 * this_place().rank)
        try:
            F.cross_entropy(ddp(x), y).backward()
        except MismatchError as error:
            try:
                ddp(x)
            except CommunicationError as later:
                return f"{error}; then {later}"
            return str(error)
    return "sent"


def a_copy_trains() -> tuple[Found, Found]:
    with torch_world():
        model = build("mlp")
        twin = copy.deepcopy(DistributedDataParallel(model))
        loop(twin)
        loop(DistributedDataParallel(model))
        return end_of(twin.module), end_of(model)
