"""A small model whose gradients ranks reduce, and what one process finds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elche.comm.gradients.part_weights import StepPart
from elche.comm.gradients.reducer import GradientReducer

Gradients = list[torch.Tensor | None]
Sizes = Sequence[int]
CAPS = {"a bucket each": 1, "a few buckets": 300, "one bucket": 1 << 20}


class Net(nn.Module):
    """Layers of unlike size, one that large parts use, and one that nobody uses."""

    def __init__(self, hidden: int = 9, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        self.large = nn.Linear(4, 2)
        self.never = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        """One per sample; the second layer helps where there are four at least."""
        x = x.to(self.never.dtype)
        out = self.body(x)
        if len(x) >= 4:
            out = out + self.large(x).tanh()
        return out.square().sum(1)


def nets(ranks: int) -> list[Net]:
    """Made here: torch's generator is one for all threads."""
    return [Net() for _ in range(ranks)]


def batch_of(rank: int, step: int, samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(samples, 4, generator=generator)


def gradients_of(model: nn.Module) -> Gradients:
    return [
        None if p.grad is None else p.grad.detach().clone() for p in model.parameters()
    ]


def alone(
    step: int,
    sizes: Sizes,
    weights: Sequence[float] | None = None,
    model: Net | None = None,
) -> Gradients:
    """Adds the gradient of all parts' mean, weighted by samples if not otherwise."""
    model = Net() if model is None else model
    weights = sizes if weights is None else weights
    for rank, (samples, weight) in enumerate(zip(sizes, weights, strict=True)):
        if weight:
            mean = model.losses(batch_of(rank, step, samples)).mean()
            (mean * (weight / sum(weights))).backward()
    return gradients_of(model)


def trained(
    reducer: GradientReducer,
    model: Net,
    rank: int,
    plan: Sequence[Sizes],
    weights: Sequence[Sequence[float]] | None = None,
) -> list[Gradients]:
    """Runs a rank's steps; returns the reduced gradients of each.

    A rank without samples runs its loop body on some that are not its own.

    Args:
        reducer: of the model.
        model: the rank's.
        rank: this one.
        plan: samples of each rank in each step.
        weights: that users give to each rank's part; None: its samples.
    """
    found = []
    for number, sizes in enumerate(plan):
        model.zero_grad()
        weight = None if weights is None else weights[number][rank]
        active = sum(size > 0 for size in sizes)
        reducer.begin_step(StepPart(sizes[rank] / sum(sizes), active, weight))
        model.losses(batch_of(rank, number, sizes[rank] or 4)).mean().backward()
        reducer.end_step()
        found.append(gradients_of(model))
    return found
