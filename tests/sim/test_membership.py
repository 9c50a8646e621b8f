"""Ranks that die and join: who holds what, what is redone, how long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elche.coordination.protocol.events import BatchesDone
from elche.coordination.protocol.instructions import (
    BeginEpoch,
    Regroup,
    Welcome,
)
from elche.sim.cluster import Cluster, Device, Fault, Link, SimulatedRun
from elche.sim.rank import ALL_DEAD
from elche.sim.report import report_of
from tests.sim.checks import metrics_of_epochs, simulate, told

DEVICE = Device(seconds_per_sample=0.002, count=3, jitter=0.2, name="CPU")
WINDOWS = ["cadence", "async"]
POLICIES = ["sync", *WINDOWS]
WHOLE = {"windows": {"local_batch_size": 8}}


def cluster_of(policy: str, *faults: Fault, **changes: object) -> Cluster:
    run = SimulatedRun(
        policy=policy,
        samples=8000,
        batch_size=8,
        model_bytes=1e7,
        epochs=2,
        seed=3,
        # Over this link sync would leave out all but one.
        options=WHOLE if policy in WINDOWS else {"leave_out": False},
    )
    return Cluster(
        run=replace(run, **changes),  # type: ignore[arg-type]
        devices=(DEVICE,),
        link=Link(latency_s=0.001, bytes_per_s=1e8, efficiency=1.0),
        faults=faults,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at_s", [0.6, 1.234, 2.0, 2.5])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.every(5)
def test_a_death_costs_a_moment_and_no_batch(
    policy: str, at_s: float, rank: int
) -> None:
    sim = simulate(cluster_of(policy, Fault(at_s=at_s, kill_rank=rank)))
    history = sim.history
    assert history.finished == {0, 1, 2} - {rank}
    assert history.committed[0, 0] == history.committed[0, 1] == frozenset(range(1000))
    (recovery_s,) = report_of(sim).recovery_s
    assert recovery_s is not None
    # A message, the batch in hand, the new group, and a reduction to take over.
    assert recovery_s <= 0.5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at_s", [0.6, 1.234, 2.0, 2.5])
@pytest.mark.every(5)
def test_what_is_lost_with_a_rank_is_counted_once_and_told(
    policy: str, at_s: float
) -> None:
    sim = simulate(cluster_of(policy, Fault(at_s=at_s, kill_rank=2)))
    epochs = metrics_of_epochs(sim)
    claimed = [0, 0]
    for event in told(sim, BatchesDone):
        claimed[event.epoch] += event.samples
    assert [each.samples for each in epochs] == [8000, 8000]
    assert sim.history.samples == 16000
    lost = [sum(each.discarded_samples) for each in epochs]
    if policy == "sync":  # a step that is not of all is of nobody
        assert lost == [0, 0]
    else:
        assert lost == [each - 8000 for each in claimed]
        assert sum(lost) == sum(sum(e.discarded_samples[2:]) for e in epochs) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_joins_gets_the_model_and_then_work(policy: str) -> None:
    join = Fault(at_s=2.0, join=replace(DEVICE, seconds_per_sample=0.0005))
    sim = simulate(cluster_of(policy, join))
    assert sim.history.finished == {0, 1, 2, 3}
    assert [(one.rank, one.joined) for one in told(sim, Regroup)] == [
        *((rank, (3,)) for rank in range(3)),
        (3, (0, 1, 2, 3)),
    ]
    kinds = Welcome, Regroup, BeginEpoch
    to_three = [type(one) for _, one in sim.messages if one.rank == 3]
    assert [kind for kind in to_three if kind in kinds][:3] == [*kinds]
    # It is as fast as all the others together.
    samples = [sums.samples for sums in sim.history.ranks.values()]
    assert samples[3] > 0.8 * max(samples[:3])
    if policy != "sync":  # which reduces 10 MB after every 8 samples
        assert report_of(sim).efficiency > 0.7


WAITS, IS_HANDED, HAS = "rank 0 is gone", ALL_DEAD, ""


@pytest.mark.parametrize(
    ("policy", "dies_after_s", "says"),
    [
        *((policy, 0.003, WAITS) for policy in POLICIES),
        *(("sync", 0.4, IS_HANDED), ("sync", 1.0, HAS)),  # granted steps are run first
        *((policy, 0.1, IS_HANDED) for policy in WINDOWS),
        *((policy, 0.4, HAS) for policy in WINDOWS),
    ],
)
def test_who_was_never_handed_the_model_does_not_go_on_with_its_own(
    policy: str, dies_after_s: float, says: str
) -> None:
    device = replace(DEVICE, count=1)
    join = Fault(at_s=1.0, join=device)
    death = Fault(at_s=1.0 + dies_after_s, kill_rank=0)
    sim = simulate(replace(cluster_of(policy, join, death), devices=(device,)))
    history = sim.history
    if says:
        assert says in (sim.core.aborted or "")
        assert says in history.aborts[1].reason
    else:
        assert not history.aborts
        assert history.committed[0, 1] == frozenset(range(1000))
