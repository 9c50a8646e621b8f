"""How much of the devices' summed speed a run delivers, in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from elche.coordination.protocol.instructions import OpenWindow
from elche.sim.cluster import Cluster, Device, Drift, Link, LinkChange, SimulatedRun
from elche.sim.report import Report, report_of
from elche.sim.simulation import Simulation
from tests.harness.settings import nested
from tests.sim.checks import batches_of, shares_of, simulate, told

BATCH_SAMPLES = 32
FAST_BATCH_S = 0.04
LATENCY_S = 0.0005
BYTES_PER_S = 1.25e9
SPEEDS = [(1.0, 4.0), (1.0, 1.5, 2.5, 4.0)]
COSTS = [0.3, 3.0]
NOISES = ["none", "10 %", "30 %", "spikes", "slower"]
BATCHES_PER_RANK = 2000
OVERHEAD_TARGET = 0.03


def pairs(anchors: tuple[int, ...]) -> list[Any]:
    """All settings; those beyond every pair of two of them are slow, and some more."""
    found = []
    for noise, anchor, cost, speeds in product(
        range(len(NOISES)), range(len(anchors)), range(2), range(2)
    ):
        is_fast = cost == (noise + anchor) % 2 and speeds == (noise + (anchor > 0)) % 2
        found.append(
            pytest.param(
                *(SPEEDS[speeds], COSTS[cost], NOISES[noise], anchors[anchor]),
                marks=[] if is_fast else [pytest.mark.slow],
            )
        )
    return found


def bytes_for(cost_batches: float, ranks: int) -> float:
    """A model whose reduction takes so many fast batches."""
    latencies_s = 2 * math.ceil(math.log2(ranks)) * LATENCY_S
    sent = (cost_batches * FAST_BATCH_S - latencies_s) * BYTES_PER_S
    return sent / (2 * (ranks - 1) / ranks)


def cluster_of(
    policy: str,
    slowdowns: tuple[float, ...],
    noise: str = "none",
    cost: float = 0.3,
    batches: int = BATCHES_PER_RANK,
    **options: Any,
) -> Cluster:
    """Devices of these batch times; the last is slower midway if ``noise`` says so.

    Local batches are as large as those of ``sync``.
    """
    if policy != "sync":
        options["local_batch_size"] = BATCH_SAMPLES
    world_size = len(slowdowns)
    shared: dict[str, Any] = {"prefetch": 4}
    if noise.endswith("%"):
        shared["jitter"] = float(noise[:-1]) / 100
    if noise == "spikes":
        shared |= {"spike_probability": 0.01, "spike_factor": 10.0}
    rate = sum(1.0 / slowdown for slowdown in slowdowns) / FAST_BATCH_S
    midway_s = 0.5 * batches * world_size / rate
    devices = [
        Device(seconds_per_sample=FAST_BATCH_S * slowdown / BATCH_SAMPLES, **shared)
        for slowdown in slowdowns
    ]
    if noise == "slower":
        devices[-1] = replace(devices[-1], drift=(Drift(at_s=midway_s, factor=2.0),))
    return Cluster(
        run=SimulatedRun(
            policy=policy,
            samples=BATCH_SAMPLES * batches * world_size,
            batch_size=BATCH_SAMPLES,
            model_bytes=bytes_for(cost, world_size),
            options=nested(options),
            seed=1,
        ),
        devices=tuple(devices),
        link=Link(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S, efficiency=1.0),
    )


def run(cluster: Cluster) -> Report:
    sim = Simulation(cluster)
    sim.run()
    return report_of(sim)


@pytest.mark.parametrize(("slowdowns", "cost", "noise", "anchor"), pairs((1, 5, 20)))
@pytest.mark.every(2)
def test_async_delivers_the_summed_speed(
    slowdowns: tuple[float, ...], cost: float, noise: str, anchor: int
) -> None:
    cluster = cluster_of(
        "async", slowdowns, noise, cost, anchor=anchor, max_anchor=anchor
    )
    report = run(cluster)
    assert report.efficiency >= (0.97 if anchor == 1 else 0.99)
    # A rank trains at most two windows on an old average, or one and twelve batches
    # of the slowest rank; then it waits. (Some batches are short, and a spike makes El
    # Che take a rank for slower.)
    slowest = max(slowdowns) * {"slower": 2.0, "spikes": 1.5}.get(noise, 1.2)
    assert report.lag_batches[1] <= (anchor + max(anchor, 12)) * slowest + 2


@pytest.mark.parametrize(("slowdowns", "cost", "noise", "anchor"), pairs((1, 10)))
@pytest.mark.every(2)
def test_cadence_costs_what_the_overhead_target_allows(
    slowdowns: tuple[float, ...], cost: float, noise: str, anchor: int
) -> None:
    cluster = cluster_of("cadence", slowdowns, noise, cost, 4000, anchor=anchor)
    report = run(cluster)
    # A rank counts a rise of its own cost as fourfold at most, and spikes are tenfold.
    slack = 0.03 if noise == "spikes" else 0.02
    assert report.efficiency >= 1.0 / (1.0 + OVERHEAD_TARGET) - slack


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("slowdowns", SPEEDS)
@pytest.mark.parametrize("noise", ["none", "10 %"])
@pytest.mark.every(3)
def test_the_ranks_end_an_epoch_together(
    policy: str, slowdowns: tuple[float, ...], noise: str
) -> None:
    spreads = []
    for seed in range(10):
        cluster = cluster_of(policy, slowdowns, noise, batches=200)
        cluster = replace(cluster, run=replace(cluster.run, seed=seed))
        busy = batches_of(simulate(cluster))
        ends_s = {each.rank: each.start_s + each.duration_s for each in busy}.values()
        spreads.append((max(ends_s) - min(ends_s)) / (4.0 * FAST_BATCH_S))
    # In batches of the slowest rank: its last one may begin when the others end. What
    # ten percent of jitter adds was 1.31 at most, in 20 runs of each policy.
    assert sum(spreads) / len(spreads) <= 0.8
    assert max(spreads) <= (1.01 if noise == "none" else 1.35)


@pytest.mark.parametrize("slowdowns", SPEEDS)
@pytest.mark.parametrize("noise", ["none", "10 %"])
def test_shares_of_sync_converge_to_equal_times(
    slowdowns: tuple[float, ...], noise: str
) -> None:
    cluster = cluster_of("sync", slowdowns, noise)
    run_of = replace(
        cluster.run, samples=80_000, batch_size=100, model_bytes=0.0, options={}
    )
    sim = simulate(replace(cluster, run=run_of, link=Link(latency_s=1e-5)))
    ((shares),) = shares_of(sim)[0, 0, 799]
    costs_s = [device.seconds_per_sample for device in cluster.devices]
    times_s = [share * cost for share, cost in zip(shares, costs_s, strict=True)]
    ideal_s = 100 / sum(1.0 / cost for cost in costs_s)
    jitter = 0.1 if noise != "none" else 0.0
    assert max(times_s) <= ideal_s * (1.03 + 0.5 * jitter) + max(costs_s)
    report = report_of(sim)
    assert report.efficiency >= (0.93 if noise == "none" else 0.83)
    assert report.waits["reduction"] <= 0.03


def test_the_anchor_grows_when_the_link_slows_and_comes_back() -> None:
    cluster = cluster_of("cadence", (1.0, 1.0), cost=0.3, batches=8000)
    changes = (
        LinkChange(at_s=40.0, bytes_per_s=BYTES_PER_S / 10),
        LinkChange(at_s=80.0, bytes_per_s=BYTES_PER_S),
    )
    sim = simulate(replace(cluster, link_changes=changes))
    plans = {plan.window: plan for plan in told(sim, OpenWindow, 0)}
    began_s, anchors = 0.0, []
    for _, plan in sorted(plans.items()):
        anchors.append((began_s, plan.planned_batches))
        began_s += plan.wall_s or 0.0
    before = max(count for at_s, count in anchors if 20.0 <= at_s < 35.0)
    most = max(count for _, count in anchors)
    assert 5 * before <= most <= 15 * before
    slow = [count for at_s, count in anchors if at_s >= 40.0]
    recovered = [count for at_s, count in anchors if at_s >= 90.0]
    # Grown fivefold after 5 windows; then it falls by a batch in each window, until
    # the overhead is half the target.
    assert next(at for at, count in enumerate(slow) if count >= 5 * before) <= 6
    back = next(at for at, count in enumerate(recovered) if count <= 2 * before + 1)
    assert back <= most
