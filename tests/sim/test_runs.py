"""Whole runs in virtual time: many ranks, one rank, El Che off, grants in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.history import LEASE
from tests.harness.settings import nested
from tests.sim.checks import check_all, simulate
from tests.sim.strategies import clusters

POLICIES = ["sync", "cadence", "async"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("world_size", "batches"), [(16, 7), (32, 3), (32, 120)])
def test_many_ranks_share_few_and_many_batches(
    policy: str, world_size: int, batches: int
) -> None:
    devices = tuple(
        Device(seconds_per_sample=0.001 * (1 + rank % 5), jitter=0.1, prefetch=rank % 9)
        for rank in range(world_size)
    )
    run = SimulatedRun(policy=policy, batch_sizes=((20, batches), (3, 1)), epochs=2)
    link = Link(latency_s=0.0, spread_s=0.002)
    check_all(simulate(Cluster(run=run, devices=devices, link=link)))


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_without_el_che_the_slow_rank_closes_when_it_gets_no_more(policy: str) -> None:
    # Once: as above, in its shortest form.
    devices = tuple(Device(seconds_per_sample=s, prefetch=0) for s in (0.003, 0.048))
    options = {"max_anchor": 0}
    run = SimulatedRun(
        policy=policy, options=nested(options), samples=320, batch_size=8
    )
    check_all(simulate(Cluster(run=run, devices=devices)))


@pytest.mark.reaches("reductions", "commits")
@given(clusters("sync"), st.sampled_from([0.0, 0.0005]))
@settings(max_examples=60)
def test_no_rank_waits_for_a_grant_of_sync_once_it_has_begun(
    cluster: Cluster, latency_s: float
) -> None:
    # Once: from about 10 times slower steps on, the grants still out are counted
    # in steps of the old length, and every loader runs dry once.
    link = Link(latency_s=latency_s, bytes_per_s=1e9)
    devices = tuple(replace(d, load_seconds_per_sample=0.0) for d in cluster.devices)
    # Where a rank is left out all wait: for the steps granted before, then it alone.
    run = replace(cluster.run, options={"leave_out": False})
    sim = simulate(replace(cluster, link=link, devices=devices, run=run))
    check_all(sim)
    firsts: dict[int, int] = {}
    for each in sim.history.spans:
        is_wait = each.name == f"wait: {LEASE}"
        firsts[each.rank] = firsts.get(each.rank, 0) + is_wait
    # An epoch's first grant is on its way when its loop begins.
    assert all(count <= cluster.run.epochs for count in firsts.values()), firsts


def test_a_run_is_the_same_twice_and_another_with_another_seed() -> None:
    def ends_s(seed: int) -> tuple[float, int]:
        device = Device(seconds_per_sample=0.01, count=3, jitter=0.3)
        run = SimulatedRun(samples=800, batch_size=8, seed=seed)
        sim = simulate(Cluster(run=run, devices=(device,), link=Link(spread_s=0.001)))
        return sim.end_s, sim.load.events

    assert ends_s(1) == ends_s(1)
    assert ends_s(1)[0] != ends_s(2)[0]
