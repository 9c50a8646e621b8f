"""Runs of random clusters: all of the data, once, to the end, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.sim.cluster import Cluster, Link
from elche.sim.history import LEASE
from tests.sim.checks import (
    check_all,
    check_outlived,
    check_windows,
    positions,
    simulate,
    trained_positions,
)
from tests.sim.strategies import clusters, deaths

THROTTLED = pytest.mark.reaches("reductions", "commits", "waits for the slowest")
LATE = pytest.mark.reaches(*THROTTLED.args, "late adoptions")


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("sync", marks=pytest.mark.reaches("reductions", "commits")),
        pytest.param("cadence", marks=THROTTLED),
        pytest.param("async", marks=LATE),
    ],
)
@given(data=st.data())
@settings(max_examples=150)
def test_every_position_is_trained_on_once(policy: str, data: st.DataObject) -> None:
    check_all(simulate(data.draw(clusters(policy))))


@pytest.mark.reaches("reductions", "commits", "epochs left early")
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@given(data=st.data())
@settings(max_examples=80)
def test_a_break_on_any_rank_ends_the_epoch_for_all_with_a_commit(
    policy: str, data: st.DataObject
) -> None:
    cluster = data.draw(clusters(policy, breaks=True))
    sim = simulate(cluster)
    history, run = sim.history, cluster.run
    assert not history.aborts, next(iter(history.aborts.values())).reason
    if policy != "sync":
        check_windows(sim)
    sizes, everything = BatchSizes(run.sizes), positions(run.sizes)
    left = {one.epoch for one in cluster.breaks}
    for epoch in range(run.epochs):
        assert history.ended[0, epoch] == set(range(cluster.world_size))
        trained = trained_positions(history, 0, epoch)
        assert trained <= everything
        if policy != "sync":
            bounds = pairwise(map(sizes.position_of, range(sizes.num_batches + 1)))
            assert history.committed[0, epoch] == {
                batch
                for batch, part in enumerate(bounds)
                if trained.keys() >= {*range(*part)}
            }
        if epoch not in left:
            assert trained == everything


@pytest.mark.reaches(
    "reductions",
    "commits",
    "deaths",
    "joins",
    "redone reductions",
    "results taken over",
    "models handed over",
    "sources other than the first",
)
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@given(data=st.data())
@settings(max_examples=150)
def test_deaths_and_joins_lose_nothing_and_count_nothing_twice(
    policy: str, data: st.DataObject
) -> None:
    cluster = data.draw(clusters(policy, changes=True))
    check_outlived(simulate(cluster, data.draw(deaths())))


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
