"""Overlapped averaging on links that take many batches for a reduction."""

from __future__ import annotations

import pytest

from elche.sim.cluster import Cluster, Device, Link, LinkChange, SimulatedRun
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


def test_auto_runs_two_steps_on_a_link_that_it_leaves() -> None:
    report = run("auto", (1.0, 0.25), 0.04, 0.8, run_s=100.0)
    assert [phase.policy for phase in report.phases] == ["sync", "async"]
    assert report.phases[0].samples <= 2 * BATCH
    assert report.goodput >= 0.98 - 2 * 0.8 / 100.0


def test_auto_grants_ahead_where_a_reduction_is_quick() -> None:
    report = run("auto", (1.0, 0.25), 0.02, 0.09, run_s=20.0)
    assert report.phases[0].samples > 2 * BATCH


def test_windows_of_equal_ranks_stay_short_on_a_quick_link() -> None:
    """A result is seen at a batch's end; that batch is not the reduction's time."""
    cluster = Cluster(
        run=SimulatedRun(
            policy="async",
            samples=16000,
            batch_size=32,
            model_bytes=4e6,
            seed=3,
            options={"windows": {"anchor": 1, "local_batch_size": 32}},
        ),
        devices=(Device(seconds_per_sample=0.01, count=2),),
        link=Link(latency_s=0.0001, bytes_per_s=1e10),
    )
    batches, windows = 500, report_of(simulate(cluster)).windows
    # Of three batches each: where each average is adopted a batch late, that pays.
    assert windows >= 0.9 * batches / (3 * 2)


def test_windows_are_short_again_after_one_reduction_that_hung() -> None:
    """The first one took 10 s, the others 0.2: windows stayed near the longest."""
    bytes_per_s = MODEL_BYTES / 0.2

    def simulated(changes: tuple[LinkChange, ...], bytes_per_s: float) -> Report:
        cluster = Cluster(
            run=SimulatedRun(
                policy="async",
                samples=BATCH * 5_000,
                batch_size=BATCH,
                model_bytes=MODEL_BYTES,
                seed=2,
                options={
                    "windows": {
                        "anchor": 5,
                        "max_anchor": 50,
                        "local_batch_size": BATCH,
                    }
                },
            ),
            devices=tuple(
                Device(seconds_per_sample=0.01 / BATCH / speed) for speed in (1.0, 0.25)
            ),
            link=Link(bytes_per_s=bytes_per_s, efficiency=1.0),
            link_changes=changes,
        )
        return report_of(simulate(cluster))

    usual = simulated((), bytes_per_s)
    recovered = LinkChange(at_s=1.0, bytes_per_s=bytes_per_s)
    hung = simulated((recovered,), MODEL_BYTES / 10.0)
    # The pause and windows of up to 50 batches of 0.04 s pass before it is known.
    assert hung.windows >= usual.windows * (1.0 - 2 * (10.0 + 2.0) / usual.seconds)
