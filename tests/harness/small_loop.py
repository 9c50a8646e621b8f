"""A small model and its loop, for scripts that launchers start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import tests.harness.uncompiled.sitecustomize  # noqa: F401 - starts faster

EMPTY: Mapping[str, Any] = {}


def begin(
    samples: int,
    batch_size: int,
    loader: Mapping[str, Any] = EMPTY,
    lr: float = 0.1,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Begins a run; returns its model, optimizer and loader.

    Args:
        samples: of an epoch.
        batch_size: of the loader.
        loader: further arguments of it.
        lr: of the optimizer.
        options: of `elche.setup`.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = TensorDataset(torch.randn(samples, 4))
    batches = DataLoader(data, batch_size=batch_size, **loader)
    return elche.setup(model, optimizer, batches, **options)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
    """A step on one batch."""
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sum_of(model: nn.Module) -> float:
    """Of all parameters: equal where models are."""
    return sum(float(each.detach().sum()) for each in model.parameters())
