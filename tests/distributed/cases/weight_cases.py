"""A model whose parameters say how often each sample counted, in a run that changes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import elche
from elche.coordination.protocol.events import JoinReady
from elche.runtime.process.launchers import launch_facts
from tests.distributed.cases.counting import Indices
from tests.distributed.cases.deaths import die, visit_events
from tests.harness.waiting import until

SAMPLES, BATCH = 480, 12
SLOW_S = 0.05
"""Duration of a batch on the other ranks until the victim has died."""


def weigh(
    folder: str, policy: str, founders: int, victim: int, epochs: int = 4
) -> list[tuple[int, list[int], list[float]]]:
    """In the second epoch a rank dies, and in the third others join.

    Returns:
        After each epoch: the world's size, the sizes of this rank's batches, and what
        each sample counted in the epoch.
    """
    rank, joins = int(os.environ["RANK"]), launch_facts().joins
    come, ready = Path(folder, "come"), Path(folder, f"ready{rank}")
    died = Path(folder, "died")
    if joins:
        until(come.exists)
        visit_events(JoinReady, ready.touch, is_before=False)
    model = torch.nn.Embedding(SAMPLES, 1).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if os.environ["COMING"] == str(founders):  # unknown to elche: bars joins, no deaths
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader: DataLoader[int] = DataLoader(Indices(SAMPLES), BATCH, shuffle=True)
    model, optimizer, loader = elche.setup(
        *(model, optimizer, loader),
        policy=policy,
        loss_reduction="sum",
        timeout_s=60.0,
        windows=elche.WindowConfig(outer=elche.config.OuterConfig(optimizer="average")),
    )
    found: list[tuple[int, list[int], list[float]]] = []
    for epoch in elche.epochs(epochs):
        before, sizes = model.weight.detach().clone(), list[int]()
        for number, index in enumerate(loader):
            sizes.append(len(index))
            model(index).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (rank, epoch, number) == (victim, 1, 5):
                died.touch()
                die()
            if epoch == 1 and victim not in (-1, rank) and not died.exists():
                time.sleep(SLOW_S)  # the others leave batches to be cut anew
            if not joins and (epoch, number) == (2, 3):
                come.touch()
                for other in range(founders, int(os.environ["COMING"])):
                    until(Path(folder, f"ready{other}").exists)
        counted = (before - model.weight.detach()).flatten().tolist()
        found.append((elche.world_size(), sizes, counted))
    elche.shutdown()
    return found
