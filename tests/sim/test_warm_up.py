"""Shares after a warm-up that takes as long on all ranks, so that they look equal."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from elche.coordination.protocol.instructions import GrantBatches
from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.rank import Rank
from tests.sim.checks import simulate, told

BATCH, FIXED_S, SAMPLE_S = 32, 0.004, 0.00125
COLD_S = 0.15, 0.05, 0.008
"""Extra time of the first steps, on each rank."""
FIRST_TRIAL = 32
"""Earliest step with trial shares."""


@pytest.mark.parametrize("is_timed", [True, False])
@pytest.mark.parametrize("slow", [0.25, 0.4, 0.67])
def test_shares_are_right_after_one_warm_step(slow: float, is_timed: bool) -> None:
    """Real ranks do not time their very first step."""
    devices = [
        Device(
            seconds_per_sample=SAMPLE_S / speed,
            seconds_per_batch=FIXED_S,
            first_batch_s=0.0 if is_timed else 1e-9,
            name=f"x{speed}",
        )
        for speed in (1.0, slow)
    ]
    run = SimulatedRun(samples=60 * BATCH, policy="sync", model_bytes=1e5)
    link = Link(latency_s=1e-4, bytes_per_s=1e10)
    ran = [0, 0]
    warm_s = Rank.compute_s

    def cold_s(rank: Rank, samples: int) -> tuple[float, bool]:
        busy_s, timed = warm_s(rank, samples)
        number, ran[rank.rank] = ran[rank.rank], ran[rank.rank] + 1
        return busy_s + (*COLD_S, *[0.0] * 60)[number], timed

    with patch.object(Rank, "compute_s", cold_s):
        sim = simulate(Cluster(devices=tuple(devices), link=link, run=run))
    grants = [each for each in told(sim, GrantBatches, rank=0) if each.shares]
    later = {each.shares for each in grants if len(COLD_S) < each.start < FIRST_TRIAL}

    def step_s(fast: int) -> float:
        return max(map(Device.compute_s, devices, (fast, BATCH - fast)))

    best_s = min(map(step_s, range(1, BATCH)))
    assert max(step_s(fast) for fast, _ in later) < 1.08 * best_s, later
