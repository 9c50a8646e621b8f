"""What must hold of every simulated run, whatever its cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.sim.cluster import Cluster
from elche.sim.history import History
from elche.sim.simulation import Simulation, Watch
from tests.sim.watched import Death, WatchedSimulation

MOST_HAPPENINGS = 400_000


def simulate(
    cluster: Cluster, deaths: Sequence[Death] = (), **watch: bool
) -> Simulation:
    """Runs a cluster with every check on, and notes what it came to."""
    watched = Watch(checks=True, details=True, most_happenings=MOST_HAPPENINGS, **watch)
    sim = WatchedSimulation(cluster, watched, deaths)
    sim.run()
    sim.note()
    return sim


def check_all(sim: Simulation) -> None:
    """A run without failures and breaks: all of it, once, by all."""
    history, run = sim.history, sim.cluster.run
    assert not history.aborts, next(iter(history.aborts.values())).reason
    ranks = set(range(sim.cluster.world_size))
    assert history.finished == ranks
    everything = positions(run.sizes)
    for number in range(run.runs):
        for epoch in range(run.epochs):
            assert history.ended[number, epoch] == ranks
            assert trained_positions(history, number, epoch) == everything
    if run.policy == "sync":
        check_shares(sim)
    else:
        check_windows(sim)
    batches = frozenset(range(BatchSizes(run.sizes).num_batches))
    for number in range(run.runs):
        for epoch in range(run.epochs):
            assert history.committed[number, epoch] == batches


def positions(sizes: tuple[tuple[int, int], ...]) -> Counter[tuple[int, int]]:
    """Every (batch, sample of it) of an epoch, once."""
    flat = [samples for samples, count in sizes for _ in range(count)]
    return Counter(
        (batch, at) for batch, samples in enumerate(flat) for at in range(samples)
    )


def trained_positions(
    history: History, run: int, epoch: int
) -> Counter[tuple[int, int]]:
    """How often each (batch, sample of it) was trained on."""
    return Counter(
        (batch, at)
        for _, batch, start, stop in history.trained[run, epoch]
        for at in range(start, stop)
    )


def check_shares(sim: Simulation) -> None:
    """All ranks were told the same split of each step, and it is one of it."""
    run = sim.cluster.run
    sizes = [samples for samples, count in run.sizes for _ in range(count)]
    for (_, _, step), told in sim.history.shares.items():
        assert len(told) == 1, f"step {step} was split differently: {told}"
        (shares,) = told
        assert len(shares) == sim.cluster.world_size
        assert sum(shares) == sizes[step]
        least = min(run.min_share_samples, sizes[step])
        assert all(share == 0 or share >= least for share in shares)


def check_windows(sim: Simulation) -> None:
    """Each reduction's weights sum to one, and who did nothing weighs nothing."""
    history = sim.history
    for (run, window, _), plans in history.plans.items():
        done = history.in_window[run, window]
        weights = {rank: plan.weight for rank, plan in plans.items()}
        if any(done.values()):
            assert sum(weights.values()) == pytest.approx(1.0)
        for rank, weight in weights.items():
            assert (weight > 0.0) == (done.get(rank, 0) > 0), (window, weights)
    reduced = {(run, window) for run, window, _ in history.plans}
    for key, done in history.in_window.items():
        assert key in reduced, f"{key}: {done} was never reduced"
