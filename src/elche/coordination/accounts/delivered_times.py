"""Delivered time of batches: measured once on each rank, added up for its reports.

The worker's loops and the simulator's measure the times. `StepReports`, `LeaseReports`
and runs on one device add them up and report them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Costs:
    """Time of batches on a rank.

    Not frozen: creating a frozen instance takes three times as long.

    Attributes:
        samples: this rank's samples.
        busy_s: delivered time: waiting for data, transfer and compute, without the
            wait for other ranks.
        data_wait_s: part of ``busy_s`` spent waiting for data.
        transfer_s: part of ``busy_s`` spent moving data to the device.
        sync_wait_s: wait for other ranks.
        reduce_s: part of ``busy_s`` for reductions in backward; none on a rank alone.
    """

    samples: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0
    sync_wait_s: float = 0.0
    reduce_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class BatchCost(Costs):
    """Time of one batch, or one step, on a rank.

    Attributes:
        is_timed: False for a first batch of its kind (compilation), not a speed.
    """

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
        """Computes the costs from the times of request, arrival on the device, and end.

        Args:
            samples: this rank's samples.
            times_s: these three times.
            transfer_s: part of the time before arrival that moved data to the device.
            sync_wait_s: part of the time after the arrival spent waiting for ranks.
            is_timed: see `BatchCost`.
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


@dataclass(slots=True, kw_only=True)
class DeliveredTimes(Costs):
    """Sums over a rank's batches since its last report.

    Attributes:
        batches: number of batches.
        timed: number of batches that measure speed (``is_timed``).
        timed_s: delivered time of the ``timed`` batches.
    """

    batches: int = 0
    timed: int = 0
    timed_s: float = 0.0

    def add(self, cost: BatchCost) -> None:
        """Adds a finished batch."""
        self.samples += cost.samples
        self.busy_s += cost.busy_s
        self.data_wait_s += cost.data_wait_s
        self.transfer_s += cost.transfer_s
        self.sync_wait_s += cost.sync_wait_s
        self.reduce_s += cost.reduce_s
        self.batches += 1
        if cost.is_timed:
            self.timed += 1
            self.timed_s += cost.busy_s
