"""Deterministic runs: the same assignment, whatever the timing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elche.coordination.protocol.events import ModelUpdated
from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.simulation import Simulation
from tests.harness.settings import nested
from tests.sim.checks import check_all, samples_by_window, simulate, told

Trace = tuple[Any, Any, Any]


def cluster_of(policy: str, seed: int, **changes: Any) -> Cluster:
    options = {"anchor": 2} if policy != "sync" else {}
    run = SimulatedRun(
        policy=policy,
        samples=2400,
        batch_size=8,
        model_bytes=1e6,
        epochs=2,
        seed=seed,
        options=nested(options | changes.pop("options", {})),
    )
    return Cluster(
        run=replace(run, **changes),
        devices=tuple(
            Device(seconds_per_sample=s, jitter=0.3) for s in (0.001, 0.0017, 0.004)
        ),
        link=Link(latency_s=0.0005, spread_s=0.003),
    )


def what_happened(sim: Simulation) -> Trace:
    """Who trained on what in which window, and when averages were adopted."""
    history = sim.history
    per_rank = {
        epoch: [
            [(start, stop) for r, start, stop in done if r == rank] for rank in range(3)
        ]
        for (_, epoch), done in history.trained.items()
    }
    adopted = {
        rank: [said.adopted_at for said in told(sim, ModelUpdated, rank)]
        for rank in range(3)
    }
    windows = [done for _, done in sorted(samples_by_window(sim).items())]
    return per_rank, windows, adopted


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_deterministic_runs_do_the_same_whatever_the_timing(policy: str) -> None:
    sims = [
        simulate(cluster_of(policy, seed, options={"deterministic": True}))
        for seed in (1, 2)
    ]
    for sim in sims:
        check_all(sim)
    assert sims[0].end_s != sims[1].end_s
    assert what_happened(sims[0]) == what_happened(sims[1])
