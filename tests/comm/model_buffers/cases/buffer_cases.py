"""A model whose ranks come to hold other buffers, and what changes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.model_buffers.known_buffers import shared_tensors
from elche.comm.tensors.equal_tensors import make_equal
from elche.comm.transport.process_group import Group
from elche.errors import ElcheError
from elche.session.process import current_run, failing_together
from tests.comm.joined import joined
from tests.comm.plans import plan
from tests.harness.logged import logged
from tests.harness.rank_main import this_place
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
class Script:
    """What happens to the buffers, and to the run.

    Attributes:
        change: of buffers; see :func:`change`.
        rank: where they change, if not on all ranks.
        options: of `elche.setup`.
        unfreezes: the last layer is trained from the second epoch on.
        samples: of the dataset.
        epochs: of the run.
    """

    change: str
    rank: int
    options: dict[str, Any]
    unfreezes: bool = False
    samples: int = 48
    epochs: int = 2


@dataclass(frozen=True)
class Seen:
    """What a rank holds at the end, and what it said."""

    error: str
    state: dict[str, torch.Tensor]
    caches: dict[str, tuple[int, ...]]
    said: list[str]
    policies: list[str]


def change(model: Any, what: str, rank: int, batch: int) -> None:
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


def train(script: Script) -> Seen:
    """Trains while buffers change; what was wrong comes back as text."""
    torch.manual_seed(2)
    model: Any = Bare() if script.change.startswith("appear") else Cached()
    model.out.requires_grad_(not script.unfreezes)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(Vectors(script.samples), batch_size=6)
    error, policies = "", []
    with logged("elche.comm", logging.INFO) as lines:
        try:
            with failing_together():
                model, optimizer, loader = elche.setup(
                    model, optimizer, loader, **nested(script.options)
                )
                for epoch in range(script.epochs):
                    model.out.requires_grad_(epoch > 0 or not script.unfreezes)
                    for number, (x, y) in enumerate(loader):
                        change(model, script.change, script.rank, epoch * 1000 + number)
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        policies.append(_policy())
        except ElcheError as raised:
            error = str(raised)
    said = [line for line in lines if "are averaged" not in line]  # test_hints.py
    state = {name: value.clone() for name, value in model.state_dict().items()}
    own = {
        name: tuple(buffer.shape)
        for name, buffer in model.named_buffers()
        if name.startswith(("cache", "late"))
    }
    elche.shutdown()
    return Seen(error, state, own, said, [name for name, _ in groupby(policies)])


def _policy() -> str:
    run = current_run()
    return "" if run is None else run._synchroniser.policy


def regrouped(change_of_members: str) -> dict[str, torch.Tensor]:
    """Averages, grows, and averages again where a rank has gone, or has come.

    Who stays keeps its averager when a rank goes; when one comes, all build anew.
    """
    place = this_place()
    last = place.world_size - 1
    torch.manual_seed(2)
    model = Cached()
    stay = tuple(range(last))
    first, then = (None, stay) if change_of_members == "goes" else (stay, None)
    if first is None or place.rank != last:
        with joined("gloo", members=first, name="first") as group:
            averager = _averager_of(model, group)
            _average(model, averager, group, 1)
    elif change_of_members == "comes":
        _keep(model, "late", torch.ones(3))
    if then is None or place.rank != last:
        with joined("gloo", members=then, name="then") as group:
            if change_of_members == "goes":
                averager.connect(group)
            else:
                make_equal(group, shared_tensors(model, group), "a join")
                averager = _averager_of(model, group)
            _average(model, averager, group, 10)
    return {name: value.clone() for name, value in model.state_dict().items()}


def _averager_of(model: nn.Module, group: Group) -> ParameterAverager:
    averager = ParameterAverager(list(model.parameters()), model, list, group)
    averager.build()
    return averager


def _all_changed(group: Group, mine: Sequence[int]) -> list[int]:
    """Buffers that any rank changed; every rank waits here, as for a `Reduce`."""
    flags = torch.zeros(16)
    flags[list(mine)] = 1.0
    group.all_reduce(flags, "all ranks to close")
    return [index for index, flag in enumerate(flags.tolist()) if flag]


def _average(model: Cached, averager: Any, group: Group, length: int) -> None:
    """One window in which caches grow apart and statistics change."""
    own = 1 + group.rank
    generator = torch.Generator().manual_seed(own)
    _keep(model, "cache", torch.ones(own * length, FEATURES))
    with torch.no_grad():
        model(own + torch.randn(6, FEATURES, generator=generator))
    buffers = _all_changed(group, averager.changed_buffers())
    count = group.world_size
    averager.reduce(plan(weight=1 / count, active_ranks=count, buffers=tuple(buffers)))
