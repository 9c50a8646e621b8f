"""Delivered time of batches: measured once on each rank, added up for its reports.

The loops of the worker's shell and of the simulator measure; `StepReports`,
`LeaseReports` and a run on one device add up and report. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class BatchCost:
    """Time of one batch, or one step, on a rank.

    Not frozen, for then making one takes three times as long.

    Attributes:
        samples: of its own.
        busy_s: delivered time: waiting for data, transfer and compute, without the
            wait for other ranks.
        data_wait_s: of it, waiting for data.
        transfer_s: of it, moving them to the device.
        sync_wait_s: the wait for other ranks.
        is_timed: False for a first one of its kind (compilation): no measure of speed.
    """

    samples: int
    busy_s: float
    data_wait_s: float
    transfer_s: float = 0.0
    sync_wait_s: float = 0.0
    is_timed: bool = True

    @classmethod
    def measured(
        cls,
        samples: int,
        times_s: tuple[float, float, float],
        transfer_s: float,
        sync_wait_s: float = 0.0,
        *,
        is_timed: bool = True,
    ) -> BatchCost:
        """From when it was asked for, when it was on the device, and when it was done.

        Args:
            samples: of its own.
            times_s: these three times.
            transfer_s: what of the time before it was there moved it to the device.
            sync_wait_s: what of the time after that was spent on other ranks.
            is_timed: as above.
        """
        began_s, ready_s, done_s = times_s
        return cls(
            samples=samples,
            busy_s=done_s - began_s - sync_wait_s,
            data_wait_s=max(0.0, ready_s - began_s - transfer_s),
            transfer_s=transfer_s,
            sync_wait_s=sync_wait_s,
            is_timed=is_timed,
        )


@dataclass(slots=True)
class DeliveredTimes:
    """Time of a rank's batches since its last report; attributes of `BatchCost`.

    Attributes:
        batches: how many.
        timed: how many of them are a measure of speed ...
        timed_s: ... and the delivered time of those.
    """

    samples: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0
    sync_wait_s: float = 0.0
    batches: int = 0
    timed: int = 0
    timed_s: float = 0.0

    def add(self, cost: BatchCost) -> None:
        """One batch more is done."""
        self.samples += cost.samples
        self.busy_s += cost.busy_s
        self.data_wait_s += cost.data_wait_s
        self.transfer_s += cost.transfer_s
        self.sync_wait_s += cost.sync_wait_s
        self.batches += 1
        if cost.is_timed:
            self.timed += 1
            self.timed_s += cost.busy_s
