"""What ranks run in the distributed tests, and the same work in one plain process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import elche
from elche.errors import ElcheError
from elche.session.process import current_run, failing_together
from tests.harness.settings import nested

COMMON_STEPS: dict[str, Any] = {
    "policy": "cadence",
    "update": "gradients",
    "deterministic": True,
    "speed_hints": (1.0, 0.5),
}
"""Windows of two batches and one, each a common step."""


class Numbered(Dataset[Any]):
    """Samples that carry their own index, and a draw of each generator."""

    def __init__(self, length: int, features: int = 6, dtype: str = "float32") -> None:
        generator = torch.Generator().manual_seed(7)
        kind = getattr(torch, dtype)
        self.x = torch.randn(length, features, generator=generator).to(kind)
        self.y = torch.randint(3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        draw = torch.rand(()).item() + random.random()
        return self.x[index], self.y[index], index, draw


class EveryOther(Sampler[int]):
    """A user's own sampler: even positions, backwards."""

    def __init__(self, length: int) -> None:
        self.indices = list(range(0, length, 2))[::-1]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Uneven(Sampler[list[int]]):
    """A user's own batch sampler: batches of growing size."""

    def __init__(self, length: int) -> None:
        edges, at, size = [], 0, 1
        while at < length:
            edges.append(list(range(at, min(length, at + size))))
            at += size
            size = size % 5 + 1
        self.batches = edges

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class Task:
    """What to train, in one process or on several."""

    samples: int = 100
    batch_size: int = 16
    epochs: int = 2
    dtype: str = "float32"
    optimizer: str = "sgd"
    model: str = "mlp"
    shuffle: bool = True
    drop_last: bool = False
    sampler: str | None = None
    num_workers: int = 0
    persistent_workers: bool = False
    loop: str = "plain"
    weighs: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def label_sum(batch: Any) -> torch.Tensor:
    """What a batch of a task that ``weighs`` is to weigh."""
    total: torch.Tensor = batch[1].sum()
    return total


def build(task: Task) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Model, optimizer and loader, the same at every call."""
    torch.manual_seed(3)
    random.seed(3)
    layers: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)),
        "norm": lambda: nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        ),
        "unused": lambda: _Unused(),
        "tied": lambda: _Tied(),
        "frozen": _frozen,
    }
    model = layers[task.model]().to(getattr(torch, task.dtype))
    optimizer: torch.optim.Optimizer
    if task.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = Numbered(task.samples, dtype=task.dtype)
    order = torch.Generator().manual_seed(11)
    workers: dict[str, Any] = {"num_workers": task.num_workers, "generator": order}
    if task.num_workers:
        workers["persistent_workers"] = task.persistent_workers
    drawn: dict[str | None, Callable[[], dict[str, Any]]] = {
        "uneven": lambda: {"batch_sampler": Uneven(task.samples)},
        "every-other": lambda: {"sampler": EveryOther(task.samples)},
        None: lambda: {"shuffle": task.shuffle, "drop_last": task.drop_last},
    }
    given = drawn[task.sampler]()
    if task.sampler != "uneven":
        given["batch_size"] = task.batch_size
    return model, optimizer, DataLoader(dataset, **given, **workers)


class _Unused(nn.Module):
    """One parameter that nothing uses, and one that only odd samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.never = nn.Parameter(torch.ones(4))
        self.sometimes = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        chosen = x[:, 0] > 0.5
        if bool(chosen.any()):
            out = out.clone()
            out[chosen] = out[chosen] + self.sometimes(x[chosen])
        return out


class _Tied(nn.Module):
    """A weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.second(torch.tanh(self.first(x))))
        return out


def _frozen() -> nn.Module:
    """Most of it is not trained."""
    layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    layers[0].requires_grad_(False)
    return layers


@dataclass
class Trace:
    """What a process saw and holds at the end."""

    rank: int = 0
    orders: list[list[int]] = field(default_factory=list)
    batch_sizes: list[list[int]] = field(default_factory=list)
    draws: dict[tuple[int, int], float] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    length: int = 0
    shares: list[tuple[float, ...]] = field(default_factory=list)
    busy_s: list[tuple[float, ...]] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)
    mask: float = 0.0


def plain(task: Task) -> Trace:
    """The task in this process, by plain PyTorch alone."""
    model, optimizer, loader = build(task)
    return _loop(task, model, optimizer, loader)


def shared(task: Task, at_step: Callable[[], None] = lambda: None) -> Trace:
    """The task on this rank of a run; ``at_step`` is called in each step."""
    options = {"policy": "sync", **task.options}
    if task.weighs:
        options["weight_of"] = label_sum
    model, optimizer, loader = begin(task, **options)
    trace = _loop(task, model, optimizer, loader, at_step)
    run = current_run()
    if run is not None:
        trace.shares = [each.shares for each in run.notifications.epoch_metrics]
        trace.busy_s = [each.busy_s for each in run.notifications.epoch_metrics]
        trace.windows = [report.windows for report in run.epochs.reports]
    if task.loop == "scaler":
        trace.scalars = elche.epoch_metrics().scalars
    trace.rank = elche.rank()
    trace.mask = float(torch.rand(()))
    elche.shutdown()
    return trace


def _loop(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    at_step: Callable[[], None] = lambda: None,
) -> Trace:
    trace = Trace(length=len(loader))
    scaler = scaler_of_a_loop()
    is_last = elche.rank() == elche.world_size() - 1
    for epoch in range(task.epochs):
        order: list[int] = []
        sizes: list[int] = []
        for number, (x, y, index, draw) in enumerate(loader):
            run = current_run()
            if run is None or run.current_samples:
                order += index.tolist()
                sizes.append(len(x))
                for i, value in zip(index.tolist(), draw.tolist(), strict=True):
                    trace.draws[epoch, i] = value
            trace.progress.append(elche.progress_samples())
            loss = loss_of(task.loop, model, x, y)
            is_bad = is_last and number == 1
            step_of(task.loop, number, loss, model, optimizer, scaler, is_bad=is_bad)
            at_step()
        trace.orders.append(order)
        trace.batch_sizes.append(sizes)
    trace.state = state_of(model)
    return trace


def scaler_of_a_loop() -> torch.amp.GradScaler:
    """For loops that scale; each process has its own."""
    return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)


def loss_of(
    kind: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """A batch's mean loss; in a loop with autocast computed in half precision."""
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        return F.cross_entropy(model(x), y)


def step_of(
    kind: str,
    number: int,
    loss: torch.Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    is_bad: bool = False,
) -> None:
    """One step of the user's loop, in its variants; ``is_bad`` is for a scaler."""
    if kind == "scaler":
        _scaled_step(loss, model, optimizer, scaler, is_bad=is_bad)
        return
    is_accumulated = kind.startswith("accumulate")
    (loss / 2 if is_accumulated else loss).backward()
    if is_accumulated and number % 2 == 0:
        return
    if kind == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=kind != "accumulate-in-place")


def _scaled_step(
    loss: torch.Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    is_bad: bool,
) -> None:
    """A GradScaler loop; under sync all must skip a step that overflows on one."""
    if is_bad:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def begin(task: Task, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """What the loop of a run on this task has, by options that stand side by side."""
    return elche.setup(*build(task), **nested(options))


def error_of(train: Callable[..., object], *args: Any) -> str:
    """Ends a run after its loop; this rank's error by name, if there is one."""
    said = ""
    try:
        with failing_together():
            train(*args)
    except ElcheError as error:
        said = f"{type(error).__name__}: {error}"
    elche.shutdown()
    return said


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> None:
    """A step on one batch."""
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of what it holds."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Relative L2 difference of all float tensors of two states."""
    a = torch.cat([v.double().flatten() for v in one.values()])
    b = torch.cat([v.double().flatten() for v in other.values()])
    return float((a - b).norm() / b.norm())


def positions(traces: list[Trace], epoch: int) -> list[int]:
    """What ranks have trained on in an epoch, in the order of samples."""
    return sorted(index for trace in traces for index in trace.orders[epoch])


def identical(states: list[dict[str, torch.Tensor]]) -> bool:
    """Whether all states are equal to the bit."""
    first = states[0]
    return all(
        first.keys() == state.keys()
        and all(torch.equal(first[name], state[name]) for name in first)
        for state in states
    )
