"""How long ``auto`` goes on measuring."""

from __future__ import annotations

import pytest

from elche.cadence.chooser import Chooser
from elche.config import RunConfig
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_calibration import MOST_STEPS, Calibration
from elche.coordination.auto.auto_choice import MeasuredChoice
from elche.coordination.auto.auto_gauge import Gauge
from elche.coordination.policy import Member
from elche.coordination.protocol.events import StepsDone
from elche.coordination.sync.sync_policy import SyncPolicy

BATCH = 32


def calibrated(
    fixed_s: float,
    sync_s: float,
    run_steps: int,
    slower: float = 1.0,
    compiling_s: float = 0.0,
) -> tuple[int, MeasuredChoice]:
    """Warm steps until the choice, and the choice; two devices, 1 ms per sample."""
    config = RunConfig(policy="auto")
    members = [Member(rank, "cpu", 2) for rank in range(2)]
    gauge = Gauge(config, 2, 1)
    gauge.begin_epoch(float(run_steps))
    calibration = Calibration(
        gauge, SyncPolicy(members, Settings(config=config)), Chooser
    )
    calibration.prepare(sync_s)
    for count in range(MOST_STEPS + 2):
        spared = gauge.to_spare(BATCH, gauge.measurements) if count > 1 else ()
        sizes = [1 if rank in spared else BATCH // 2 for rank in range(2)]
        if spared:
            sizes[1 - spared[0]] = BATCH - 1
        took_s = [fixed_s + 0.001 * sizes[0], slower * (fixed_s + 0.001 * sizes[1])]
        if not count:
            took_s = [s + compiling_s for s in took_s]
        reports = [
            StepsDone(
                rank=rank,
                epoch=0,
                start=count,
                stop=count + 1,
                samples=sizes[rank],
                busy_s=took_s[rank],
                data_wait_s=0.0,
                sync_wait_s=sync_s + max(took_s) - took_s[rank],
                warm=count > 0,
                backward_passes=count + 1,
            )
            for rank in range(2)
        ]
        found = calibration.take(reports, BATCH, run_steps)
        if found is not None:
            return gauge.measurements, found
    raise AssertionError("it never chose")


def test_a_reduction_of_a_hundredth_of_the_run_lets_the_first_step_decide() -> None:
    steps, found = calibrated(0.01, 1.0, 300)
    assert steps == 0
    assert found.now.is_alone


def test_a_first_step_that_compiled_decides_for_no_windows() -> None:
    """By it a run of 6 s seemed one of 130 s, in which windows of 2.4 s pay."""
    steps, found = calibrated(0.0, 2.0, 200, compiling_s=0.65)
    assert steps == 1
    assert found.now.is_alone


def test_devices_that_are_hopeless_together_are_measured_no_further() -> None:
    """All but nothing of a step is fixed: equal steps and one whole batch show it."""
    steps, found = calibrated(0.2, 0.1, 100_000, slower=8.0)
    assert steps == 2
    assert found.now.is_alone


@pytest.mark.parametrize(("run_steps", "least"), [(1000, 2), (100_000, MOST_STEPS)])
def test_a_clear_gain_is_made_sure_of_where_that_is_free(
    run_steps: int, least: int
) -> None:
    steps, found = calibrated(0.0, 0.05, run_steps)
    assert not found.now.is_alone
    assert found.now.policy == "async"
    assert least <= steps <= (least if least == MOST_STEPS else 6)
