"""What ranks run in the tests of `elche.DistributedDataParallel`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

from elche.ddp.wrapper import DistributedDataParallel
from tests.harness.rank_main import Place, this_place

STORE = "DDP_CASE_STORE"
FEATURES = 6


@contextmanager
def meeting(world_size: int) -> Iterator[Sequence[Mapping[str, str]]]:
    """A folder where the ranks of a case find each other; gloo on loopback."""
    with tempfile.TemporaryDirectory() as folder:
        yield [{STORE: folder, "GLOO_SOCKET_IFNAME": "lo"}] * world_size


@contextmanager
def torch_world(timeout_s: float = 60.0) -> Iterator[None]:
    """torch's default group of all ranks of the case."""
    place = this_place()
    store = dist.FileStore(os.path.join(os.environ[STORE], "world"), place.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        _all_in(store, place, timeout_s)
        yield
    finally:
        dist.destroy_process_group()


def _all_in(store: dist.FileStore, place: Place, timeout_s: float) -> None:
    """Waits for the others: gloo fails where one leaves while another connects."""
    store.set(f"in {place.rank}", "yes")
    ranks = [f"in {rank}" for rank in range(place.world_size)]
    store.wait(ranks, timedelta(seconds=timeout_s))


class Branches(nn.Module):
    """Uses one of its branches; nobody ever uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        out: torch.Tensor = self.branches[branch](self.stem(x).tanh())
        return out


class Tied(nn.Module):
    """One weight in two places, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(
            self.second(self.frozen(self.first(x).tanh()).tanh())
        )
        return out


def build(model: str, dtype: str = "float64", seed: int = 3) -> nn.Module:
    """A model of that name, the same at every call with the same seed."""
    torch.manual_seed(seed)
    made: nn.Module
    if model == "mlp":
        made = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 3))
    elif model == "deep":
        layers = [nn.Linear(FEATURES, FEATURES) for _ in range(6)]
        made = nn.Sequential(*layers, nn.Linear(FEATURES, 3))
    elif model == "cnn":
        made = nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)),
            nn.Conv1d(1, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * FEATURES, 3),
        )
    elif model == "branches":
        made = Branches()
    elif model == "tied":
        made = Tied()
    else:
        raise ValueError(model)
    return made.to(getattr(torch, dtype))


@dataclass(frozen=True)
class Plan:
    """What to train: per step, the samples of each rank; 0 is a rank without a batch.

    Attributes:
        branches: per step, the branch that each rank takes, for that model.
        micro: micro-batches per step, all but the last under no_sync.
        tokens: per step, the weight of each rank, whose batch may be empty.
        options: of the wrapper.
    """

    sizes: tuple[tuple[int, ...], ...]
    model: str = "mlp"
    dtype: str = "float64"
    loss: str = "mean"
    branches: tuple[tuple[int, ...], ...] = ()
    micro: int = 1
    tokens: tuple[tuple[int, ...], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The union batch of a step."""
        generator = torch.Generator().manual_seed(100 + step)
        count = sum(self.sizes[step])
        x = torch.randn(count, FEATURES, generator=generator)
        y = torch.randint(3, (count,), generator=generator)
        return x.to(getattr(torch, self.dtype)), y


@dataclass
class Trace:
    """Gradients after each step's backward, and the end."""

    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: list[tuple[float, ...]] = field(default_factory=list)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def alone(plan: Plan) -> Trace:
    """The same steps in this process, on the union batches."""
    model, trace = build(plan.model, plan.dtype), Trace()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, sizes in enumerate(plan.sizes):
        x, y = plan.batch(step)
        if plan.branches:
            parts = zip(plan.branches[step], x.split(sizes), strict=True)
            out = torch.cat([model(part, branch) for branch, part in parts])
        else:
            out = model(x)
        F.cross_entropy(out, y, reduction=plan.loss).backward()
        trace.gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    trace.state = {k: v.clone() for k, v in model.state_dict().items()}
    return trace


def wrap(plan: Plan, model: nn.Module) -> Any:
    return DistributedDataParallel(model, **plan.options)


def train(plan: Plan) -> Trace:
    """The plan on this rank; the model begins with other values on every rank."""
    with torch_world():
        model = build(plan.model, plan.dtype, seed=3 + this_place().rank)
        return steps(plan, wrap(plan, model))


def steps(plan: Plan, ddp: Any, rank: int | None = None) -> Trace:
    """The plan's steps with a wrapper."""
    trace, rank = Trace(), this_place().rank if rank is None else rank
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step, sizes in enumerate(plan.sizes):
        x, y = plan.batch(step)
        begin = sum(sizes[:rank])
        mine = slice(begin, begin + sizes[rank])
        if plan.tokens:
            ddp.set_weight(plan.tokens[step][rank])
        if sizes[rank] or plan.tokens:
            extra = (plan.branches[step][rank],) if plan.branches else ()
            _backward(plan, ddp, x[mine], y[mine], extra)
        else:
            ddp.join_step()
        trace.gradients.append(gradients_of(ddp.module))
        if ddp.last_reduction is not None:
            trace.weights.append(ddp.last_reduction.weights)
        optimizer.step()
        optimizer.zero_grad()
    trace.state = {k: v.clone() for k, v in ddp.module.state_dict().items()}
    return trace


def _backward(
    plan: Plan, ddp: Any, x: torch.Tensor, y: torch.Tensor, extra: tuple[int, ...]
) -> None:
    parts = list(zip(x.chunk(plan.micro), y.chunk(plan.micro), strict=True))
    for number, (part_x, part_y) in enumerate(parts):
        is_last = number + 1 == len(parts)
        with nullcontext() if is_last else ddp.no_sync():
            out = ddp(part_x, *extra)
            loss = F.cross_entropy(out, part_y, reduction=plan.loss)
            loss = loss if len(part_y) else out.sum()
            if plan.loss == "mean":
                loss = loss / len(parts)
            loss.backward()


def complete_when_sent(strategy: str) -> list[int]:
    """Buckets that were complete when each one was sent."""
    complete, sent = 0, []
    with torch_world():
        ddp: Any = DistributedDataParallel(
            build("deep"), strategy=strategy, bucket_cap_mb=2e-4
        )
        F.cross_entropy(
            ddp(torch.ones(2, FEATURES).double()), torch.tensor([0, 1])
        ).backward()
        reduction = ddp._reduction
        send, reduce = reduction._send, reduction.reduce

        def counted(bucket: Any) -> Any:
            nonlocal complete
            complete += 1
            return reduce(bucket)

        def noted(*message: Any) -> Any:
            sent.append(complete)
            return send(*message)

        reduction.reduce, reduction._send = counted, noted
        F.cross_entropy(
            ddp(torch.ones(2, FEATURES).double()), torch.tensor([0, 1])
        ).backward()
    return sent
