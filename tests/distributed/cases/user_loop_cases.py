"""Loops as people write them, on ranks and in one process."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.session.process import current_run
from tests.distributed.cases.tasks import error_of, state_of
from tests.harness.settings import nested

SAMPLES, BATCH, FEATURES = 48, 4, 6
POISON = 12
"""The first sample of the batch that some loops pass over."""

POLICIES: dict[str, dict[str, Any]] = {
    "sync": {"policy": "sync"},
    "cadence": {"policy": "cadence", "max_anchor": 0},
    "async": {"policy": "async", "max_anchor": 0},
    **{
        f"{policy}, planned": {
            "policy": policy,
            "deterministic": True,
            "max_anchor": 1,
            "speed_hints": (1.0, 0.5),
        }
        for policy in ("cadence", "async")
    },
    "gradients": {
        "policy": "cadence",
        "update": "gradients",
        "local_batch_size": BATCH,
        "max_anchor": 0,
        "deterministic": True,
    },
}


@dataclass(frozen=True)
class Job:
    """What is trained, and how the loop is written."""

    policy: str = "sync"
    loop: str = "plain"
    model: str = "mlp"
    optimizer: str = "sgd"
    batch_size: int = BATCH
    bucket_cap_mb: float = 25.0

    def alone(self) -> Job:
        """The same steps in one process: a gradient window is one batch per rank."""
        size = 2 * BATCH if self.policy == "gradients" else self.batch_size
        return dataclasses.replace(self, batch_size=size)


@dataclass
class Found:
    """What a process holds at the end, or why it ended; passes that were reduced."""

    error: str = ""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    passes: int = 0
    steps: int = 0


def _build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    if job.model.startswith("reentrant"):
        model = Reentrant(has_head=job.model != "reentrant throughout")
    if job.model == "called otherwise":
        model = CalledOtherwise()
    if job.model == "omitting":
        model = Omitting()
    if job.model.startswith("shared"):
        model = Shared(*SHARED_TIMES[job.model])
    if job.model.startswith("channels last"):
        layers = nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 8, 3, padding=1), nn.Flatten()
        model = nn.Sequential(*layers, nn.Linear(24, 3))
        if not job.model.endswith("on one") or os.environ.get("RANK") == "1":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.double()
    optimizers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        "body": lambda p: torch.optim.SGD(list(p)[:2], lr=0.1),
    }
    optimizer = optimizers[job.optimizer](model.parameters())
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator).double()
    y = torch.randint(3, (SAMPLES,), generator=generator)
    dataset = TensorDataset(x, y, torch.arange(SAMPLES))
    return model, optimizer, DataLoader(dataset, job.batch_size)


def alone(job: Job) -> Found:
    """By plain PyTorch."""
    job = job.alone()
    model, optimizer, loader = _build(job)
    _train(job, model, optimizer, loader)
    return Found(state=state_of(model))


def on_ranks(job: Job) -> Found:
    """On this rank of a run."""
    options = {"bucket_cap_mb": job.bucket_cap_mb, **POLICIES[job.policy]}
    model, optimizer, loader = elche.setup(*_build(job), **nested(options))
    run, steps = current_run(), list[int]()
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    assert run is not None
    reducer = run._synchroniser.reducer
    error = error_of(_train, job, model, optimizer, loader)
    passes = 0 if reducer is None else reducer.backward_passes
    return Found(error, state_of(model), passes, len(steps))


class CalledOtherwise(nn.Sequential):
    """Its parts are called, and it is not."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.Linear(16, 3))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self[1](self[0](x).tanh())
        return out


class Reentrant(nn.Module):
    """Layers whose activations are computed again, by a backward pass of their own."""

    def __init__(self, *, has_head: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.head = nn.Linear(3, 3) if has_head else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(self._nested, x, use_reentrant=True)
        return x if self.head is None else self.head(x)

    def _nested(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.second[:2], x, use_reentrant=True)
        out: torch.Tensor = self.second[2](hidden)
        return out


class Masked(torch.autograd.Function):
    """Scales some samples; where it scaled none, its backward returns None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, scale, mask)
        return x * scale * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, scale, mask = ctx.saved_tensors
        if not mask.any():
            return None, None, None
        return grad * scale * mask, (grad * x * mask).sum(0), None


class Omitting(nn.Module):
    """Autograd comes to some parameters without a gradient, in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 3)
        self.rare = nn.Linear(FEATURES, 3)
        self.never = nn.Linear(FEATURES, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_rare = x[:, :1] > 1.0
        rare = Masked.apply(self.rare(x), self.scale, is_rare)
        never = Masked.apply(self.never(x), self.scale, torch.zeros_like(is_rare))
        out: torch.Tensor = self.body(x) + rare + never
        return out


SHARED_TIMES = {"shared": (2, 2), "shared, varying": (2, 3), "shared later": (1, 2)}


class Shared(nn.Module):
    """A layer that several checkpointed segments use, each with a gradient for it."""

    def __init__(self, at_first: int, later: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Linear(16, 3)
        self.times = [at_first, at_first, later, at_first]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times.append(self.times.pop(0))
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        for _ in range(self.times[-1]):
            x = checkpoint(self.layer, x, use_reentrant=True)
        out: torch.Tensor = checkpoint(self.last, x, use_reentrant=True)
        return out


def _train(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> None:
    if job.loop in AHEAD:
        AHEAD[job.loop](job, model, optimizer, loader)
        return
    body = _Loop(job.loop, model, optimizer)
    for epoch in range(2):
        for number, (x, y, index) in enumerate(loader):
            body.step(x, y, index)
            if job.loop == "converted inside" and (epoch, number) == (0, 1):
                model.float()
            if job.loop == "new memory" and (epoch, number) == (0, 1):
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
        if job.loop == "new strides":
            for parameter in model.parameters():
                parameter.data = parameter.data.t().contiguous().t()
        if job.loop == "converted" and epoch == 0:
            model.float()
            optimizer.state.clear()


def _loss_of(job: Job, model: nn.Module, x: Any, y: Any, index: Any) -> torch.Tensor:
    call = model.scores if isinstance(model, CalledOtherwise) else model
    return F.cross_entropy(call(x), y)


def _fetch_ahead(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> None:
    """The next batch is asked for before the backward pass, as nanoGPT does.

    With a backward pass that counts nowhere between, a forward pass to look at, and an
    accumulated gradient every third time. An epoch's last backward pass comes in the
    next one.
    """
    batches = iter(_endless(loader))
    count, left = 0, -(-SAMPLES // job.batch_size) * 2
    batch = next(batches)
    while left:
        loss = _loss_of(job, model, *batch)
        batch, left = next(batches, None), left - 1
        if job.model == "mlp" and batch is not None:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            with torch.no_grad():
                model(batch[0])
        loss.backward()
        count += 1
        if count % 3 != 1:
            optimizer.step()
            optimizer.zero_grad()


def _endless(loader: Any) -> Any:
    while True:
        yield from loader


def _sum_losses(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> None:
    """One backward pass for four batches."""
    losses = []
    for _ in range(2):
        for batch in loader:
            losses.append(_loss_of(job, model, *batch))
            if len(losses) == 4:
                torch.stack(losses).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.clear()
        losses.clear()


AHEAD = {"fetched ahead": _fetch_ahead, "losses summed": _sum_losses}


class _Loop:
    """The inside of a loop, in its variants."""

    def __init__(
        self, kind: str, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.kind = kind
        self.model = model
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.head = torch.optim.SGD(list(model.parameters())[2:], lr=0.1)
        self.own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        hooks = {
            "halved": _halve,
            "looked at": _look,
            "stepped in backward": self._step_one,
        }
        if kind in hooks:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(hooks[kind])

    def step(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> None:
        is_poisoned = bool((index == POISON).any())
        if self.kind in ("skipped", "broken off") and is_poisoned:
            if len(x) == BATCH:  # a rank's batch of its own; else part of a union
                self._fail(x, y)
                return
            keep = (index < POISON) | (index >= POISON + BATCH)
            x, y = x[keep], y[keep]
        self.optimizer.zero_grad()
        self.head.zero_grad()
        loss = self._loss(x, y)
        if self.kind in ONCE:  # for this backward pass alone
            self._backward_with_hooks(loss, ONCE[self.kind])
            return
        if self.kind == "scaler":
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return
        loss.backward()
        if self.kind == "stepped in backward":
            return
        self.optimizer.step()
        if self.kind == "two optimizers":
            self.head.step()

    def _backward_with_hooks(self, loss: torch.Tensor, hook: Any) -> None:
        handles = [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter in self.model.parameters()
        ]
        loss.backward()
        for handle in handles:
            handle.remove()
        self.optimizer.step()

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dtype = next(self.model.parameters()).dtype
        return F.cross_entropy(self.model(x.to(dtype)), y)

    def _fail(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Nothing is learned from this batch, or an error is caught half way."""
        if self.kind == "skipped":
            return
        loss = self._loss(x, y)
        handle = next(self.model.parameters()).register_hook(_raise)
        try:
            loss.backward()
        except ZeroDivisionError:
            pass
        finally:
            handle.remove()

    def _step_one(self, parameter: torch.Tensor) -> None:
        optimizer = self.own[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _look(parameter: torch.Tensor) -> None:
    assert parameter.grad is None or parameter.grad.shape == parameter.shape


ONCE = {"halved for once": _halve, "looked at for once": _look}


def _raise(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError("a fault in a user's hook")
