"""A model whose ranks come to hold other buffers, and what changes them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche.errors import ElcheError
from elche.session.process import failing_together
from tests.harness.logged import logged
from tests.harness.settings import nested

FEATURES = 4


class Vectors(Dataset[tuple[torch.Tensor, int]]):
    """Vectors whose means are far from zero."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = 3.0 + torch.randn(length, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], index % 3


class Cached(nn.Module):
    """Statistics, which are averaged, before and after a cache."""

    cache: torch.Tensor
    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(FEATURES)
        self.register_buffer("cache", torch.ones(1, FEATURES), persistent=False)
        self.register_buffer("level", torch.zeros(2))
        self.last = nn.BatchNorm1d(FEATURES)
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level += 0.5 * (x.detach().mean() - self.level)
        out: torch.Tensor = self.out(self.last(self.first(x)))
        return out


class Bare(nn.Module):
    """No buffer at all until a forward pass makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.first(x))
        return out


@dataclass(frozen=True)
class Seen:
    """What a rank holds at the end, and what it said."""

    error: str
    state: dict[str, torch.Tensor]
    said: list[str]


def change_buffers(model: Any, what: str, rank: int, batch: int) -> None:
    """Does to this rank's buffers what the name says; called in every batch.

    Args:
        model: this rank's.
        what: is done to the buffers.
        rank: where it happens, if not on all ranks.
        batch: 0 in the run's first one.
    """
    own = elche.rank()
    if what == "grows":
        _keep(model, "cache", torch.full((1 + (own + 1) * (batch + 1), FEATURES), 7.0))
    elif what == "appear in another order":
        sizes = [("late_a", 5), ("late_b", 3 + own), ("late_c", 4)]
        for name, size in sizes if own == 0 else reversed(sizes):
            _keep(model, name, torch.full((size,), float(own + batch)))
    elif what == "appears" and own == rank:
        _keep(model, "late", torch.full((5,), float(batch)))
    elif batch or own != rank:
        return
    elif what == "vanishes":
        del model.cache
    elif what == "is wider":
        model.level = model.level.double()
    elif what == "is of another kind":
        model.cache = torch.ones(1, FEATURES, dtype=torch.int32)


def _keep(model: nn.Module, name: str, values: torch.Tensor) -> None:
    model.register_buffer(name, values, persistent=False)


def train(change: str, rank: int, options: dict[str, Any]) -> Seen:
    """Trains while buffers change; the last layer from the second epoch on.

    Args:
        change: of buffers; see :func:`change_buffers`.
        rank: where they change, if not on all ranks.
        options: of `elche.setup`.
    """
    torch.manual_seed(2)
    model: Any = Bare() if change.startswith("appear") else Cached()
    model.out.requires_grad_(False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(Vectors(48), batch_size=6)
    error = ""
    with logged("elche.comm", logging.INFO) as lines:
        try:
            with failing_together():
                model, optimizer, loader = elche.setup(
                    model, optimizer, loader, **nested(options)
                )
                for epoch in range(2):
                    model.out.requires_grad_(epoch > 0)
                    for number, (x, y) in enumerate(loader):
                        change_buffers(model, change, rank, epoch * 1000 + number)
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
        except ElcheError as raised:
            error = str(raised)
    said = [line for line in lines if "are averaged" not in line]  # test_hints.py
    state = {name: value.clone() for name, value in model.state_dict().items()}
    elche.shutdown()
    return Seen(error, state, said)
