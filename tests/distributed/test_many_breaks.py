"""Loops that break off at random steps, on random ranks: nobody waits for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

import elche
from tests.distributed.cases.tasks import Task, begin
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TASK = Task(samples=240, batch_size=12, optimizer="adamw")
POLICIES = ["sync", "cadence", "async", "auto"]


@dataclass
class Broken:
    """What a rank went through, by epochs.

    Attributes:
        breaks: epochs that its loop has left.
        seen: samples that it trained on.
        samples: of the epoch, as reported.
        sums: of all bits of the parameters.
    """

    breaks: int = 0
    seen: list[list[int]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)


def break_often(policy: str, epochs: int, seed: int) -> Broken:
    """In each epoch one to all of the ranks break off, each in a step of its own."""
    draw, found = random.Random(seed), Broken()
    model, optimizer, loader = begin(TASK, policy=policy)
    for _ in range(epochs):
        world_size = elche.world_size()
        leavers = draw.sample(range(world_size), draw.randint(1, world_size))
        steps = {rank: draw.randrange(6) for rank in leavers}
        place = {rank: draw.choice(["begin", "backward", "end"]) for rank in leavers}
        at = steps.get(elche.rank(), -1)
        found.seen.append([])
        for number, (x, y, index, _) in enumerate(loader):
            leaves = place[elche.rank()] if number == at else ""
            found.breaks += bool(leaves)
            if leaves == "begin":
                break
            F.cross_entropy(model(x), y).backward()
            found.seen[-1] += index.tolist() if elche.batch_weight() else []
            if leaves == "backward":
                break
            optimizer.step()
            optimizer.zero_grad()
            if leaves:
                break
        optimizer.zero_grad()
        found.samples.append(elche.epoch_metrics().samples)
        bits = [p.detach().view(torch.int32).sum() for p in model.parameters()]
        found.sums.append(int(torch.stack(bits).sum()))
    elche.shutdown()
    return found


def breaks_of(ranks: list[Broken]) -> int:
    """How often loops broke off; in windows some have too few batches for that."""
    assert all(rank.sums == ranks[0].sums for rank in ranks)
    assert all(rank.samples == ranks[0].samples for rank in ranks)
    for epoch in range(len(ranks[0].seen)):
        seen = [index for rank in ranks for index in rank.seen[epoch]]
        assert len(seen) == len(set(seen)) <= TASK.samples
    return sum(rank.breaks for rank in ranks)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.every(3)
def test_breaks_on_random_ranks_stall_nobody(ranks3: RankPool, policy: str) -> None:
    """Once for 60 s and more, which ended the run."""
    assert breaks_of(ranks3.serve(break_often, policy, 6, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "epochs"), [("ranks2", 44), ("ranks3", 32)])
@pytest.mark.parametrize("policy", POLICIES)
def test_breaks_again_and_again(
    request: pytest.FixtureRequest, pool: str, epochs: int, policy: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    runs = [ranks.serve(break_often, policy, epochs, seed) for seed in range(4)]
    breaks = sum(map(breaks_of, runs))
    assert breaks >= 60  # 100 and more where ranks are not kept from their batches
