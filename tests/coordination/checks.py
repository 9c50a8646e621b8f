"""What must hold of every simulated run, whatever its plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.coordination.simulated import Plan, Record


def check_run(plan: Plan, record: Record) -> None:
    """A run without failures and breaks: all of it, once, by all."""
    assert not record.aborts, next(iter(record.aborts.values())).reason
    ranks = set(range(plan.world_size))
    assert record.finished == ranks
    everything = positions(plan)
    for run in range(plan.runs):
        for epoch in range(plan.epochs):
            assert record.ended[run, epoch] == ranks
            assert trained_positions(record, run, epoch) == everything
    if plan.policy == "sync":
        check_shares(plan, record)
    else:
        check_windows(plan, record)


def positions(plan: Plan) -> Counter[tuple[int, int]]:
    """Every (batch, sample of it) of an epoch, once."""
    sizes = [samples for samples, count in plan.sizes for _ in range(count)]
    return Counter(
        (batch, at) for batch, samples in enumerate(sizes) for at in range(samples)
    )


def trained_positions(record: Record, run: int, epoch: int) -> Counter[tuple[int, int]]:
    """How often each (batch, sample of it) was trained on."""
    return Counter(
        (batch, at)
        for _, batch, start, stop in record.trained[run, epoch]
        for at in range(start, stop)
    )


def check_shares(plan: Plan, record: Record) -> None:
    """All ranks were told the same split of each step, and it is one of it."""
    sizes = [samples for samples, count in plan.sizes for _ in range(count)]
    for (_, _, step), told in record.shares.items():
        assert len(told) == 1, f"step {step} was split differently: {told}"
        (shares,) = told
        assert len(shares) == plan.world_size
        assert sum(shares) == sizes[step]
        least = min(plan.min_share_samples, sizes[step])
        assert all(share == 0 or share >= least for share in shares)


def check_windows(plan: Plan, record: Record) -> None:
    """All ranks joined every reduction, by the same plan, with right weights."""
    ranks = range(plan.world_size)
    for (run, window), plans in record.plans.items():
        assert sorted(told.rank for told in plans) == list(ranks)
        assert len({replace(told, rank=0) for told in plans}) == 1
        done = record.in_window[run, window]
        weights = plans[0].weights
        assert sum(weights) == pytest.approx(1.0)
        for rank in ranks:
            assert (weights[rank] > 0.0) == (done.get(rank, 0) > 0), (window, weights)
    for key, done in record.in_window.items():
        assert key in record.plans, f"{key}: {done} was never reduced"
    runs = {run for run, _ in record.opened}
    for run in runs:
        opened = {tuple(record.opened[run, rank]) for rank in ranks}
        assert len(opened) == 1, f"ranks number windows differently: {opened}"
        (windows,) = opened
        assert windows == tuple(range(len(windows)))
