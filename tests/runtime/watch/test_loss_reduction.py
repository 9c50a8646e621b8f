"""Losses that are sums, seen in autograd's graph."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elche.errors import ConfigError
from elche.runtime.watch.loss_reduction import LossWatch
from elche.torch_internals.passes import backward_roots
from tests.distributed.cases.tasks import Task, begin, error_of
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of what a model returns of a batch (rows of three), and its labels."""
ce = F.cross_entropy
anchor = nn.Parameter(torch.ones(5, 3))
"""A parameter that regularisers are about."""


def one_hot(labels: torch.Tensor) -> torch.Tensor:
    return F.one_hot(labels, 3).float()


def vae(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As in pytorch/examples: reconstruction and divergence, both summed."""
    lost = F.binary_cross_entropy(out.sigmoid(), one_hot(y), reduction="sum")
    return lost - 0.5 * torch.sum(1 + out - out.pow(2) - out.exp())


class Custom(torch.autograd.Function):
    """A loss of the user's own: a sum, and no word of it."""

    @staticmethod
    def forward(ctx: object, out: torch.Tensor) -> torch.Tensor:
        return out.sum()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.expand(5, 3)


SUMS: dict[str, Loss] = {
    "cross entropy": lambda out, y: ce(out, y, reduction="sum"),
    "none, then sum": lambda out, y: ce(out, y, reduction="none").sum(),
    "squares": lambda out, y: ((out - one_hot(y)) ** 2).sum(),
    "target first": lambda out, y: F.mse_loss(one_hot(y), out, reduction="sum"),
    "vae": vae,
    "time steps": lambda out, y: sum(
        (ce(out, y, reduction="sum") for _ in range(2000)), torch.zeros(())
    ),
    "regularised": lambda out, y: (
        ce(out, y, reduction="sum") + 0.1 * anchor.pow(2).sum()
    ),
}
OTHERS: dict[str, Loss] = {
    "cross entropy": lambda out, y: ce(out, y),
    "of one element": lambda out, y: ce(out, y).sum(),
    "accumulated": lambda out, y: ce(out, y) / 4,
    "scaled": lambda out, y: torch.amp.GradScaler("cpu").scale(ce(out, y)),
    "stacked means": lambda out, y: torch.stack([ce(out, y), ce(-out, y)]).sum(),
    "regularised": lambda out, y: ce(out, y) + anchor.pow(2).sum(),
    "regulariser alone": lambda out, y: F.mse_loss(
        anchor, torch.ones(5, 3), reduction="sum"
    ),
    "divided by hand": lambda out, y: ce(out, y, reduction="sum") / len(y),
    "multiplied by hand": lambda out, y: ce(out, y, reduction="sum") * (1 / len(y)),
    "masked mean": lambda out, y: (
        (ce(out, y, reduction="none") * (y > 0)).sum() / (y > 0).sum()
    ),
    "normalised weights": lambda out, y: (
        torch.full((len(y),), 1 / len(y)) * ce(out, y, reduction="none")
    ).sum(),
    "mean, then sum": lambda out, y: ((out - one_hot(y)) ** 2).mean(0).sum(),
    "by hand, and a regulariser": lambda out, y: (
        ce(out, y, reduction="sum") / len(y)
        + F.mse_loss(anchor, torch.ones(5, 3), reduction="sum")
    ),
    "custom": lambda out, y: Custom.apply(out),  # type: ignore[no-untyped-call]
    "checkpointed": lambda out, y: checkpoint(
        lambda out: ce(out, y, reduction="sum") / len(y), out, use_reentrant=True
    ),
}


def watched(model: nn.Module) -> LossWatch:
    """A watch of the losses of a model and its regularised parameter."""
    watch = LossWatch(print, refuses_sums=True, is_on=False)
    watch.attach([*model.parameters(), anchor], is_weighed=True)
    return watch


def backward(loss: Loss) -> None:
    """A batch of five forward and backward, its first backward pass watched."""
    model = nn.Linear(4, 3)
    watch = watched(model)
    try:
        loss(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 1, 0])).backward()
    finally:
        watch.detach()


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"give elche\.setup.* loss_reduction='sum'"):
        backward(SUMS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_of_what_may_be_a_mean_nothing_is_said(name: str) -> None:
    backward(OTHERS[name])


def test_only_the_first_backward_pass_is_looked_at() -> None:
    """One of `torch.autograd.grad` is none: its gradients are not reduced."""
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    watch, target = watched(model), torch.zeros(5, 3)
    torch.autograd.grad(F.mse_loss(model(x), target, reduction="sum"), model.weight)
    model(x).mean().backward()
    F.mse_loss(model(x), target, reduction="sum").backward()
    assert not watch._handles


@pytest.mark.parametrize(
    ("batches", "is_short"),
    [
        ([(5, 5), (5, 5), (5, 9), (5, 9)], False),  # 5 time steps, and another share
        ([(9, 9), (9, 9), (8, 9)], True),
        ([(9, 9), (9, 9), (9, 10)], False),
        ([(9, 9), (9, 9), (10, 10), (6, 7)], True),
        ([(9, 9), (8, 9), (9, 9)], False),
        ([(9, 9), (9, 9), (9, 3), (8, 9)], False),
    ],
)
def test_a_batch_is_short_where_its_first_dimension_counts_samples(
    batches: list[tuple[int, int]], is_short: bool
) -> None:
    """Once said of sequences, time first, when a rank's share changed."""
    lines: list[str] = []
    hints = LossWatch(lines.append, refuses_sums=True, is_on=True)
    for length, samples in batches:
        hints.begin(torch.zeros(length, 3), samples)
    assert len(lines) == is_short
    assert all("a batch of" in line for line in lines)


def test_devices_that_run_hooks_in_their_own_threads() -> None:
    """As CUDA's do, while the thread that called backward waits."""
    model = nn.Linear(4, 3)
    watch, found = watched(model), []
    watch.detach()

    def look_elsewhere(gradient: torch.Tensor) -> None:
        other = threading.Thread(
            target=lambda: found.append(backward_roots(watch._thread))
        )
        other.start()
        other.join()
        watch.look(found[0])

    model.weight.register_hook(look_elsewhere)
    loss = F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 3), reduction="sum")
    with pytest.raises(ConfigError, match="the loss is a sum"):
        loss.backward()


def _train(task: Task) -> None:
    """Two epochs of a loss that is a sum."""
    model, optimizer, loader = begin(task, **task.options)
    for _ in range(2):
        for x, y, *_ in loader:
            ce(model(x), y, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()


GRADIENT_WINDOWS = {"policy": "cadence", "update": "gradients"}


@pytest.mark.distributed
@pytest.mark.parametrize("options", [{}, GRADIENT_WINDOWS], ids=["sync", "windows"])
def test_a_sum_is_an_error_where_it_is_not_said(
    ranks2: RankPool, options: dict[str, str]
) -> None:
    task = Task(samples=64, batch_size=8, options=options)
    for said in ranks2.run(error_of, _train, task, case_setup=serve_in_thread):
        assert "the loss is a sum over the batch, but gradients" in said
