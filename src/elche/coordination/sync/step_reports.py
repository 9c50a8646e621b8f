"""A rank's step reports under ``sync``: contents and time of sending.

The worker's shell and the simulator run this same code. A grant's report is due when
its last step is done. Sending it there would make the device, and every other rank,
wait for a system call. So it is sent when the next step's backward pass begins, or as
soon as there is no next step. Pure.
"""

from __future__ import annotations

import math
from collections import deque

from elche.coordination.accounts.delivered_times import BatchCost, DeliveredTimes
from elche.coordination.protocol.events import EpochLeft, StepsDone
from elche.coordination.protocol.instructions import GrantBatches
from elche.coordination.protocol.messages import CheckRows, Scalars
from elche.coordination.sync.nonfinite import NonFiniteRecord

EARLY = "the next batch is asked for before the backward pass of the last one"
"""Reason for ``fetches_early``: steps are then reported one step later."""

SCHEDULED = "elche does not know of the learning rate scheduler (schedulers=)"
RATE_MOVES = "the learning rate changes inside an epoch"
SCALED = "the loop steps with a GradScaler"
STALE = SCHEDULED, RATE_MOVES, SCALED
"""State of a loop that moves with its batches and cannot be copied. An excluded rank
lacks it, so it never returns.
"""
UNEVEN = "some batches are not followed by a step of every optimizer"
"""Such a loop may count an epoch's batches: ranks return only at an epoch's start."""


class StepReports:
    """One rank's grants of an epoch, oldest first, and their reports.

    Args:
        rank: the rank.
        epoch: the epoch.
        numbers: record of non-finite values, updated by the shell.

    Attributes:
        due: report to send, or None.
    """

    def __init__(self, rank: int, epoch: int, numbers: NonFiniteRecord) -> None:
        self._rank = rank
        self._epoch = epoch
        self._grants: deque[GrantBatches] = deque()
        self._times = DeliveredTimes()
        self.due: StepsDone | None = None
        self._numbers = numbers

    def granted(self, grant: GrantBatches) -> None:
        """Adds a grant."""
        self._grants.append(grant)

    def step_done(self, step: int, cost: BatchCost) -> bool:
        """Records a finished step; True for the last of a grant: call :meth:`close`."""
        self._times.add(cost)
        return bool(self._grants) and step + 1 == self._grants[0].stop

    def close(
        self,
        *,
        backward_passes: int,
        pass_steps: int = 0,
        max_samples: int = 0,
        parameter_norm: float = 0.0,
        scalars: Scalars = (),
        unknown: str = "",
        checks: CheckRows = (),
    ) -> None:
        """Completes the current grant and creates its report; see `StepsDone`."""
        assert self.due is None, "the last report has not been sent"
        grant, times = self._grants.popleft(), self._times
        self._times = DeliveredTimes()
        self.due = StepsDone(
            rank=self._rank,
            epoch=self._epoch,
            start=grant.start,
            stop=grant.stop,
            samples=times.samples,
            busy_s=times.busy_s,
            data_wait_s=times.data_wait_s,
            sync_wait_s=times.sync_wait_s,
            reduce_s=times.reduce_s,
            warm=times.timed == times.batches,
            backward_passes=backward_passes,
            pass_steps=pass_steps,
            max_samples=max_samples,
            transfer_s=times.transfer_s,
            parameter_norm=parameter_norm,
            scalars=scalars,
            is_finite=self._numbers.is_finite and not math.isnan(parameter_norm),
            broken=self._numbers.broken,
            unknown=unknown,
            checks=checks,
        )

    def take(self) -> StepsDone | None:
        """Returns the due report; called at the next backward pass, or without one."""
        due, self.due = self.due, None
        return due

    def left(
        self,
        step: int,
        cost: BatchCost | None,
        scalars: Scalars,
        *,
        passes: int,
        apart: str = "",
        checks: CheckRows = (),
        stepped: int = 0,
    ) -> EpochLeft:
        """Returns the report of a loop that left the epoch early; see `EpochLeft`.

        ``cost`` is the last step's cost, None if it was added already.
        """
        if cost is not None:
            self._times.add(cost)
        times, self._times = self._times, DeliveredTimes()
        return EpochLeft(
            rank=self._rank,
            epoch=self._epoch,
            step=step,
            samples=times.samples,
            busy_s=times.busy_s,
            data_wait_s=times.data_wait_s,
            sync_wait_s=times.sync_wait_s,
            transfer_s=times.transfer_s,
            scalars=scalars,
            is_finite=self._numbers.is_finite,
            broken=self._numbers.broken,
            passes=passes,
            apart=apart,
            checks=checks,
            stepped=stepped,
        )

    def void(self) -> None:
        """Discards grants and begun steps; the next group receives new grants."""
        self._grants.clear()
        self._times = DeliveredTimes()
