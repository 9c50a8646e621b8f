"""Lease reports under windows: the shell and the simulator alike."""

from __future__ import annotations

import pytest

from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.protocol.events import BatchesDone
from elche.coordination.protocol.instructions import GrantBatches
from elche.coordination.windows.lease_reports import LeaseReports

BATCH = 4


def lease(start: int, stop: int) -> GrantBatches:
    return GrantBatches(rank=2, epoch=3, start=start, stop=stop)


def cost(busy_s: float, *, is_timed: bool = True) -> BatchCost:
    return BatchCost(
        samples=BATCH,
        busy_s=busy_s,
        data_wait_s=busy_s / 4,
        transfer_s=busy_s / 8,
        is_timed=is_timed,
    )


def done(start: int, stop: int, busy_s: float, timed: int, timed_s: float) -> object:
    return BatchesDone(
        rank=2,
        epoch=3,
        window=7,
        start=start,
        stop=stop,
        samples=BATCH * (stop - start),
        busy_s=busy_s,
        data_wait_s=busy_s / 4,
        timed=timed,
        timed_s=timed_s,
        transfer_s=busy_s / 8,
    )


def test_a_report_sums_what_its_batches_took() -> None:
    """A first batch counts as work, and not as a measure of speed."""
    reports = LeaseReports(2, 3)
    reports.granted(lease(5, 7))
    reports.granted(lease(9, 10))
    assert reports.take(7) is None
    assert not reports.batch_done(5, cost(8.0, is_timed=False))
    assert reports.batch_done(6, cost(1.0))
    assert reports.take(7) == done(5, 7, 9.0, 1, 1.0)
    assert reports.take(7) is None
    assert reports.batch_done(9, cost(2.0))  # measured for itself
    assert reports.take(7) == done(9, 10, 2.0, 1, 2.0)


def test_a_lease_is_reported_in_parts_where_somebody_waits() -> None:
    reports = LeaseReports(2, 3)
    reports.granted(lease(0, 3))
    assert not reports.batch_done(0, cost(1.0))
    assert reports.take(7) == done(0, 1, 1.0, 1, 1.0)
    assert not reports.batch_done(1, cost(2.0))
    assert reports.batch_done(2, cost(3.0))
    assert reports.take(7) == done(1, 3, 5.0, 2, 5.0)


def test_what_goes_back_is_not_reported_and_what_is_done_is() -> None:
    reports = LeaseReports(2, 3)
    reports.granted(lease(0, 3))
    assert not reports.batch_done(0, cost(1.0))
    reports.void()
    assert reports.take(7) == done(0, 1, 1.0, 1, 1.0)
    reports.granted(lease(8, 9))
    assert reports.batch_done(8, cost(1.0))
    assert reports.take(7) == done(8, 9, 1.0, 1, 1.0)


@pytest.mark.parametrize(
    ("ready_s", "transfer_s", "data_wait_s"),
    [(13.0, 0.5, 2.5), (10.0, 0.5, 0.0), (13.0, 0.0, 3.0)],
    ids=["both", "a transfer beside the step before", "on the CPU"],
)
def test_a_batch_is_measured_from_asking_to_asking(
    ready_s: float, transfer_s: float, data_wait_s: float
) -> None:
    times_s = 10.0, ready_s, 20.0
    assert BatchCost.measured(BATCH, times_s, transfer_s, 4.0) == BatchCost(
        samples=BATCH,
        busy_s=6.0,
        data_wait_s=data_wait_s,
        transfer_s=transfer_s,
        sync_wait_s=4.0,
    )
