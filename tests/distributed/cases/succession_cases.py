"""Rank 0 dies, and the next one draws the samples' order and writes checkpoints."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import elche
from elche.checkpoint.store import CheckpointStore
from elche.comm.transport.process_group import Group
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.run import Run
from elche.session.process import process
from tests.distributed.cases.meetings import Meeting
from tests.distributed.cases.survive_cases import (
    Counter,
    Death,
    Indices,
    after,
    die,
    plan_death,
)


@dataclass(frozen=True)
class Ordered:
    """What a rank that lives has at the end.

    Attributes:
        orders: positions of each epoch.
        counts: how often the model has seen each sample.
        place: of this rank.
    """

    orders: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    place: int = -1


class Plain(Counter):
    """Draws no random numbers, as one device's loop would not either."""

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        self.count += torch.bincount(index, minlength=len(self.count))
        return self.w[index].sum()


def loader_of(kind: str, samples: int) -> DataLoader[int]:
    """A loader whose order is drawn in one of the usual ways."""
    data = Indices(samples)
    own = torch.Generator().manual_seed(7)
    if kind == "global":
        return DataLoader(data, batch_size=16, shuffle=True)
    if kind == "own":
        return DataLoader(data, batch_size=16, shuffle=True, generator=own)
    if kind == "batch sampler":
        batches = BatchSampler(SubsetRandomSampler(range(samples), own), 16, False)
        return DataLoader(data, batch_sampler=batches)
    weights = WeightedRandomSampler([1.0] * samples, samples, replacement=False)
    return DataLoader(data, batch_size=16, sampler=weights)


def reference(kind: str, samples: int, epochs: int) -> list[list[int]]:
    """The orders that a plain loop in one process sees."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Plain(samples)
        assert model.w.requires_grad
        loader = loader_of(kind, samples)
        return [[int(i) for batch in loader for i in batch] for _ in range(epochs)]


def train(
    folder: str,
    deaths: tuple[Death, ...],
    policy: str,
    kind: str,
    samples: int,
    epochs: int,
    late_rank: int = -1,
    saves: bool = False,
) -> Ordered:
    """Trains, dies where planned, and says which orders it was given."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    plain = Plain(samples)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    windows = elche.WindowConfig(
        local_batch_size=4, outer=elche.config.OuterConfig(optimizer="average")
    )
    model, optimizer, loader = elche.setup(
        *(plain, optimizer, loader_of(kind, samples)),
        policy=policy,
        timeout_s=60.0,
        windows=windows,
    )
    run = process.run
    assert isinstance(run, Run)
    mine = [death for death in deaths if death.rank == rank]
    meet = Meeting("barrier", folder, rank)
    visits = [plan_death(death, folder, meet) for death in mine]
    if rank == late_rank:
        lose_the_order()
    if saves and rank == 0:
        after(CheckpointStore, "begin", die)
    orders = []
    for epoch in range(epochs):
        for number, index in enumerate(loader):
            # The next rank may come there when it is the first, as rank 0 has died.
            if saves and number == 3 and (epoch or rank == 0):
                elche.save(Path(folder, f"epoch{epoch}"))
            model(index).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.001)
            for death, visit in zip(mine, visits, strict=True):
                if death.place == "batch":
                    visit()
        keys: Any = run.epochs.opening.order.keys
        orders.append([int(key) for key in keys])
        elche.barrier()
    counts = model.count.tolist()
    place = elche.rank()
    elche.shutdown()
    assert elche.rank() == place, "who is the main process stays so"
    return Ordered(orders, counts, place)


def lose_the_order() -> None:
    """In the second epoch this rank has no order when the one that drew it dies."""
    shares = 0
    original = SampleOrder.share

    def share(order: SampleOrder, group: Group, source: int = 0) -> None:
        nonlocal shares
        shares += 1
        original(order, group, source)
        if shares == 2:
            order.keys = None
            group.wait_until(lambda: False, "a rank's death")

    SampleOrder.share = share  # type: ignore[method-assign]
