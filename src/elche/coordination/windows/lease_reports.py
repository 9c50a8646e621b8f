"""A rank's reports of its leases under windows: contents and time of sending.

The worker's shell and the simulator run this same code. A lease is reported when its
last batch is done. Earlier, if the coordinator waits for it: at a window's end, when
its untrained rest is returned, and after every batch under a throttle. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import final

from elche.coordination.accounts.delivered_times import BatchCost, DeliveredTimes
from elche.coordination.protocol.events import BatchesDone
from elche.coordination.protocol.instructions import GrantBatches


@final
class LeaseReports:
    """One rank's leases of an epoch, oldest first, with their unreported batches."""

    def __init__(self, rank: int, epoch: int) -> None:
        self._rank = rank
        self._epoch = epoch
        self._leases: deque[GrantBatches] = deque()
        self._times = DeliveredTimes()
        self._stop = 0

    def granted(self, lease: GrantBatches) -> None:
        """Adds a lease."""
        self._leases.append(lease)

    def batch_done(self, batch: int, cost: BatchCost) -> bool:
        """Records a finished batch; True if it ends its lease (see :meth:`take`)."""
        self._times.add(cost)
        self._stop = batch + 1
        if self._stop < self._leases[0].stop:
            return False
        self._leases.popleft()
        return True

    def take(self, window: int) -> BatchesDone | None:
        """Returns the report of finished batches in this window; None without any."""
        times, self._times = self._times, DeliveredTimes()
        if not times.batches:
            return None
        return BatchesDone(
            rank=self._rank,
            epoch=self._epoch,
            window=window,
            start=self._stop - times.batches,
            stop=self._stop,
            samples=times.samples,
            busy_s=times.busy_s,
            data_wait_s=times.data_wait_s,
            timed=times.timed,
            timed_s=times.timed_s,
            transfer_s=times.transfer_s,
        )

    def void(self) -> None:
        """Drops the untrained batches of the leases."""
        self._leases.clear()
