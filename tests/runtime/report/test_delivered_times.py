"""What a batch really cost reaches the coordinator: its data, its way, its computing.

Ranks measure by a clock that their own loader, transfers and computing move, so what is
reported is known to the digit on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche.comm.gradients.buckets.bucket_queue import BucketQueue
from elche.coordination.protocol.events import StepsDone
from elche.runtime.data.leased_data import LeasedBatches
from elche.runtime.emulation import EmulationConfig
from elche.runtime.process.worker import Worker
from tests.distributed.virtual_clock import VirtualClock, virtual_clock
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed

SAMPLES, BATCH_SIZE = 96, 8
LOAD_S, MOVE_S, COMPUTE_S = 0.25, 0.5, 1.0
"""Loading a sample on rank 0, moving a batch, and computing with it."""


class Slow(Dataset[Any]):
    """Samples that take long to load: on rank 1 three times as long as on rank 0."""

    def __init__(self, clock: VirtualClock, samples: int = SAMPLES) -> None:
        self.clock = clock
        self.samples = samples
        self.loaded_s = 0.0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        load_s = LOAD_S * (1 + 2 * elche.rank())
        self.clock.advance(load_s)
        self.loaded_s += load_s
        return torch.full((2,), float(index))


@dataclass
class Spent:
    """What one rank's clock says of an epoch, and what was told of all ranks."""

    loaded_s: float
    moved_s: float
    computed_s: float
    told: elche.monitor.EpochMetrics


def _epoch(policy: str) -> Spent:
    """An epoch on a device to which moving a batch takes long."""
    moved_s = computed_s = 0.0
    take = LeasedBatches.take

    def slow_take(batches: LeasedBatches) -> Any:
        nonlocal moved_s
        got = take(batches)
        if got is not None:
            clock.advance(MOVE_S)
            batches.transfer_s = MOVE_S
            moved_s += MOVE_S
        return got

    with virtual_clock() as clock, patch.object(LeasedBatches, "take", slow_take):
        torch.manual_seed(3)
        model = nn.Linear(2, 1)
        data = Slow(clock)
        model, optimizer, loader = elche.setup(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-6),
            DataLoader(data, BATCH_SIZE),
            policy=policy,
        )
        for x in loader:
            clock.advance(COMPUTE_S)
            computed_s += COMPUTE_S
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        told = elche.epoch_metrics()
        elche.shutdown()
    return Spent(data.loaded_s, moved_s, computed_s, told)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_what_a_batch_cost_is_told_by_its_parts(ranks2: RankPool, policy: str) -> None:
    spent = ranks2.run(_epoch, policy, case_setup=serve_in_thread)
    told = spent[0].told
    assert told == spent[1].told
    for rank, mine in enumerate(spent):
        assert min(mine.loaded_s, mine.moved_s, mine.computed_s) > 0.0
        assert told.data_wait_s[rank] == pytest.approx(mine.loaded_s)
        assert told.transfer_s[rank] == pytest.approx(mine.moved_s)
        parts_s = mine.loaded_s + mine.moved_s + mine.computed_s
        # A loaded machine adds microseconds that the ranks' own clock does not move.
        assert told.busy_s[rank] == pytest.approx(parts_s, rel=1e-4)


def _shares(policy: str) -> tuple[float, ...]:
    """All ranks' shares of the second epoch, where nothing but loading takes time."""
    with virtual_clock() as clock:
        model = nn.Linear(2, 1)
        model, optimizer, loader = elche.setup(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-6),
            DataLoader(Slow(clock, 480), BATCH_SIZE),
            policy=policy,
        )
        for _ in range(2):
            for x in loader:
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        shares = elche.epoch_metrics().shares
        elche.shutdown()
    return shares


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_loader_three_times_slower_gets_a_third(
    ranks2: RankPool, policy: str
) -> None:
    for shares in ranks2.run(_shares, policy, case_setup=serve_in_thread):
        assert shares == pytest.approx((0.75, 0.25), rel=0.05)


def _reductions(is_emulated: bool) -> tuple[float, list[StepsDone]]:
    """Seconds of reductions inside backward, and this rank's reports."""
    reduced_s, sent, reports = 0.0, Worker.send, list[StepsDone]()
    advance = BucketQueue.advance

    def slow_advance(queue: BucketQueue, *given: Any) -> None:
        nonlocal reduced_s
        advance(queue, *given)
        clock.advance(MOVE_S)
        reduced_s += MOVE_S

    def send(worker: Worker, event: Any) -> None:
        if is_emulated:
            emulation = EmulationConfig(1.0)
            worker.placement = replace(worker.placement, emulation=emulation)
        reports.extend([event] if isinstance(event, StepsDone) else [])
        sent(worker, event)

    with (
        virtual_clock() as clock,
        patch.object(BucketQueue, "advance", slow_advance),
        patch.object(Worker, "send", send),
    ):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = DataLoader(Slow(clock), BATCH_SIZE)
        model, optimizer, loader = elche.setup(model, optimizer, loader)
        for x in loader:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        elche.shutdown()
    return reduced_s, reports


@pytest.mark.parametrize("is_emulated", [False, True])
def test_reductions_in_compute_are_told_apart_where_nothing_hides_them(
    ranks2: RankPool, is_emulated: bool
) -> None:
    """The sleep of an emulated device would go on for as long."""
    for spent in ranks2.run(_reductions, is_emulated, case_setup=serve_in_thread):
        reduced_s, reports = spent
        told_s = sum(each.reduce_s for each in reports)
        assert reduced_s > 0.0
        assert told_s == (0.0 if is_emulated else pytest.approx(reduced_s, rel=1e-4))
        assert all(each.reduce_s <= each.busy_s for each in reports)
