"""Shares under ``sync`` in simulated runs: few sizes, and back after a throttle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elche.cadence.share_sizes import MAX_SIZES
from elche.sim.cluster import Cluster, Device, Drift, Link, SimulatedRun
from elche.sim.simulation import Simulation, Watch

BATCH, EPOCH = 64, 20 * 64 + 23


def run(cluster: Cluster) -> list[tuple[int, ...]]:
    """The shares of every step, in order."""
    sim = Simulation(cluster, Watch(details=True))
    sim.run()
    assert not sim.history.aborts
    by_step = sorted(sim.history.shares.items())
    return [next(iter(shares)) for _, shares in by_step]


def cluster_of(*speeds: float, epochs: int) -> Cluster:
    devices = [
        Device(seconds_per_sample=0.0003 / speed, jitter=0.1) for speed in speeds
    ]
    return Cluster(
        run=SimulatedRun(
            policy="sync", samples=EPOCH, batch_size=BATCH, epochs=epochs, seed=5
        ),
        devices=tuple(devices),
        link=Link(latency_s=1e-5, bytes_per_s=1e10),
    )


@pytest.mark.parametrize("speeds", [(1.0, 0.4), (1.0, 1.0, 0.5, 0.25)], ids=str)
def test_a_long_run_with_jitter_and_a_throttle_has_few_sizes(
    speeds: tuple[float, ...],
) -> None:
    cluster = cluster_of(*speeds, epochs=60)
    drift = (Drift(at_s=5.0, factor=3.0), Drift(at_s=8.0, factor=1.0))
    throttled = replace(cluster.devices[0], drift=drift)
    shares = run(replace(cluster, devices=(throttled, *cluster.devices[1:])))
    sizes = [{step[rank] for step in shares} for rank in range(len(speeds))]
    assert max(map(len, sizes)) <= MAX_SIZES
    full = [step[0] for step in shares if sum(step) == BATCH]
    assert min(full[50:]) < 0.7 * full[50]
    assert full[-1] >= 0.9 * full[50]
