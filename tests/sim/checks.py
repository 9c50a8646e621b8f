"""What must hold of every simulated run, whatever its cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.metrics import EpochMetrics
from elche.coordination.protocol.events import BatchesDone, Event
from elche.coordination.protocol.instructions import (
    EndEpoch,
    GrantBatches,
    Instruction,
    MetricsReported,
    Reduce,
    Welcome,
)
from elche.monitor.trace import BATCH, Span
from elche.sim.cluster import Cluster
from elche.sim.history import History
from elche.sim.rank import CANNOT_GO_ON
from elche.sim.simulation import Simulation, Watch
from tests.sim.books import Books
from tests.sim.watched import Death, WatchedSimulation

Kind = TypeVar("Kind", bound=Event | Instruction)
CHECKED = Watch(books=Books, details=True, most_happenings=400_000)
"""With every check on."""
EARLY = "no rank may die before the first epoch has begun"
FATAL_UNDER = {
    ("sync", "auto"): (
        "are being excluded from steps, or readmitted",
        "trains alone, and no other rank has its model",
        CANNOT_GO_ON,
    )
}
"""Deaths that end a run: see docs/protocol.md."""


def simulate(
    cluster: Cluster, deaths: Sequence[Death] = (), **watch: Any
) -> Simulation:
    """Runs a cluster with every check on, and notes what it came to."""
    sim = WatchedSimulation(cluster, replace(CHECKED, **watch), deaths)
    sim.run()
    sim.note()
    return sim


def told(sim: Simulation, kind: type[Kind], rank: int | None = None) -> list[Kind]:
    """Messages of a kind, in their order; of all ranks, or of one."""
    found = [one for _, one in sim.messages if isinstance(one, kind)]
    return [one for one in found if rank is None or one.rank == rank]


def metrics_of_epochs(sim: Simulation) -> list[EpochMetrics]:
    """Metrics of each epoch, as rank 0 is told."""
    reported = told(sim, MetricsReported, rank=0)
    return [EpochMetrics.from_json(one.values) for one in reported if one.window < 0]


def batches_of(sim: Simulation) -> list[Span]:
    """All batches, as spans of time."""
    return [each for each in sim.history.spans if each.category == BATCH]


def check_trained(sim: Simulation) -> None:
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


def check_all(sim: Simulation) -> None:
    """The same, with the shares or windows, and all committed."""
    check_trained(sim)
    history, run = sim.history, sim.cluster.run
    if run.policy == "sync":
        check_shares(sim)
    else:
        check_windows(sim)
    batches = frozenset(range(BatchSizes(run.sizes).num_batches))
    for number in range(run.runs):
        for epoch in range(run.epochs):
            assert history.committed[number, epoch] == batches


def positions(sizes: tuple[tuple[int, int], ...]) -> Counter[int]:
    """Every position of an epoch, once."""
    return Counter(range(BatchSizes(sizes).num_samples))


def trained_positions(history: History, run: int, epoch: int) -> Counter[int]:
    """How often each position was trained on."""
    return Counter(
        position
        for _, start, stop in history.trained[run, epoch]
        for position in range(start, stop)
    )


def is_ended_by_a_death(sim: Simulation) -> bool:
    """Whether the run was: by one that no real run outlives, and by its name."""
    history, policy = sim.history, sim.cluster.run.policy
    names = [] if history.phases else [EARLY]  # no epoch had begun
    for policies, more in FATAL_UNDER.items():
        names += more if policy in policies else ()
    reasons = {
        abort.reason
        for rank, abort in history.aborts.items()
        if not sim.is_rejected(rank)
    }
    for reason in reasons:
        assert any(name in reason for name in names), reason
        assert any(sums.has_died for sums in history.ranks.values()), reason
    return bool(reasons)


def check_outlived(sim: Simulation) -> None:
    """Ranks die and join: all who live train to the end, on every position once.

    Or the run is ended by a death, as a real one is.
    """
    if is_ended_by_a_death(sim):
        return
    history, run = sim.history, sim.cluster.run
    dead = {rank for rank, sums in history.ranks.items() if sums.has_died}
    late = {rank for rank in history.ranks if sim.is_rejected(rank)}
    assert history.finished == set(history.ranks) - dead - late
    batches = frozenset(range(BatchSizes(run.sizes).num_batches))
    for epoch in range(run.epochs if history.finished else 0):
        assert history.committed[0, epoch] == batches


def check_shares(sim: Simulation) -> None:
    """All ranks were told the same split of each step, and it is one of it."""
    run = sim.cluster.run
    sizes = [samples for samples, count in run.sizes for _ in range(count)]
    for (_, _, step), splits in shares_of(sim).items():
        assert len(splits) == 1, f"step {step} was split differently: {splits}"
        (shares,) = splits
        assert len(shares) == sim.cluster.world_size
        assert sum(shares) in sizes
        least = min(run.min_share_samples, sum(shares))
        assert all(share == 0 or share >= least for share in shares)


def check_windows(sim: Simulation) -> None:
    """Each reduction's weights sum to one, and who did nothing weighs nothing."""
    plans: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for run, plan in by_run(sim, Reduce):
        plans[run, plan.window][plan.rank] = plan.weight
    in_window = samples_by_window(sim)
    for key, weights in plans.items():
        done = in_window[key]
        if any(done.values()):
            assert sum(weights.values()) == pytest.approx(1.0)
        for rank, weight in weights.items():
            assert (weight > 0.0) == (done[rank] > 0), (key, weights)
    for key, done in in_window.items():
        assert key in plans, f"{key}: {done} was never reduced"


def shares_of(sim: Simulation) -> dict[tuple[int, int, int], set[tuple[int, ...]]]:
    """Splits of each step, by run, epoch (or part of one, in order) and step."""
    found: dict[tuple[int, int, int], set[tuple[int, ...]]] = defaultdict(set)
    run, part = -1, 0
    for _, one in sim.messages:
        if isinstance(one, Welcome) and one.rank == 0:
            run, part = run + 1, 0
        part += isinstance(one, EndEpoch) and one.rank == 0
        for step in range(one.start, one.stop) if isinstance(one, GrantBatches) else ():
            found[run, part, step].add(one.shares)
    return found


def samples_by_window(sim: Simulation) -> dict[tuple[int, int], Counter[int]]:
    """Samples of each rank, by run and window."""
    found: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for run, done in by_run(sim, BatchesDone):
        found[run, done.window][done.rank] += done.samples
    return found


def by_run(sim: Simulation, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
    """Messages of a kind, each with the number of its run."""
    run = -1
    for _, one in sim.messages:
        run += isinstance(one, Welcome) and one.rank == 0
        if isinstance(one, kind):
            yield run, one
