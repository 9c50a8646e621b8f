"""Overlapped averaging on links that take many batches for a reduction."""

from __future__ import annotations

import pytest

from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.report import Report, report_of
from tests.sim.checks import simulate

SPEEDS = [(1.0, 0.25), (1.0, 1.0, 0.5, 0.25)]
BATCH = 8
MODEL_BYTES = 40e6


def run(
    policy: str,
    speeds: tuple[float, ...],
    batch_s: float,
    reduction_s: float,
    run_s: float,
) -> Report:
    """A run that takes so long at full speed; batches are those of the fastest."""
    sent = 2.0 * (len(speeds) - 1) / len(speeds) * MODEL_BYTES
    cluster = Cluster(
        run=SimulatedRun(
            policy=policy,
            samples=BATCH * round(run_s * sum(speeds) / batch_s),
            batch_size=BATCH,
            model_bytes=MODEL_BYTES,
            seed=1,
        ),
        devices=tuple(
            Device(seconds_per_sample=batch_s / BATCH / speed, jitter=0.02)
            for speed in speeds
        ),
        link=Link(bytes_per_s=sent / reduction_s, efficiency=1.0),
    )
    return report_of(simulate(cluster))


@pytest.mark.parametrize(
    ("batch_s", "reduction_s", "speeds"),
    [
        (0.04, 4.0, SPEEDS[0]),
        (0.32, 0.6, SPEEDS[1]),
        pytest.param(0.04, 4.0, SPEEDS[1], marks=pytest.mark.slow),
        pytest.param(0.32, 0.6, SPEEDS[0], marks=pytest.mark.slow),
        pytest.param(0.32, 12.0, SPEEDS[0], marks=pytest.mark.slow),
        pytest.param(0.32, 12.0, SPEEDS[1], marks=pytest.mark.slow),
    ],
)
def test_only_the_last_reduction_is_waited_for(
    batch_s: float, reduction_s: float, speeds: tuple[float, ...]
) -> None:
    """It grew window by window once, and two reductions stood at the end."""
    report = run("async", speeds, batch_s, reduction_s, run_s=240.0)
    lost_s = (1.0 - report.efficiency) * report.seconds
    # Batches of the slowest rank that is measured first, and that ends last.
    assert lost_s <= 1.05 * reduction_s + 3.0 * batch_s / min(speeds)


def test_auto_grants_ahead_where_a_reduction_is_quick() -> None:
    report = run("auto", (1.0, 0.25), 0.02, 0.09, run_s=20.0)
    assert report.phases[0].samples > 2 * BATCH
