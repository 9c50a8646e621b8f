"""A rank's step reports under ``sync``: contents and time of sending.

The worker's shell and the simulator run this same code. A report of a grant's steps is
due when the last of them is done. Sending it there would keep the device, and every
other rank, waiting for a system call; so it is sent when the next step's backward pass
begins, or as soon as there is no next step to run. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import final

from elche.coordination.protocol.events import EpochLeft, StepsDone
from elche.coordination.protocol.instructions import GrantSteps
from elche.coordination.protocol.messages import Scalars
from elche.coordination.sync.nonfinite import NonFiniteRecord


@dataclass(slots=True, kw_only=True)
class StepCost:
    """What one step took a rank; not frozen, for then making one takes three times.

    Attributes:
        samples: of its own.
        busy_s: delivered time without the wait for other ranks.
        data_wait_s: of it, waiting for data.
        transfer_s: of it, moving them to the device.
        sync_wait_s: the wait for other ranks.
        warm: whether it may be timed.
    """

    samples: int
    busy_s: float
    data_wait_s: float
    transfer_s: float = 0.0
    sync_wait_s: float
    warm: bool


@dataclass(slots=True)
class _Measured:
    """What a grant's steps took so far."""

    samples: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0
    sync_wait_s: float = 0.0
    warm: bool = True


@final
class StepReports:
    """One rank's grants of an epoch, oldest first, and what is to be said of them.

    Args:
        rank: whose.
        epoch: the epoch.
        numbers: whether they were numbers; the shell keeps it up to date.
    """

    def __init__(self, rank: int, epoch: int, numbers: NonFiniteRecord) -> None:
        self._rank = rank
        self._epoch = epoch
        self._grants: deque[GrantSteps] = deque()
        self._measured = _Measured()
        self._due: StepsDone | None = None
        self._numbers = numbers

    @property
    def under_way(self) -> GrantSteps | None:
        """The grant whose steps are run."""
        return self._grants[0] if self._grants else None

    @property
    def is_due(self) -> bool:
        """Whether there is something to say."""
        return self._due is not None

    def granted(self, grant: GrantSteps) -> None:
        """More steps were granted."""
        self._grants.append(grant)

    def step_done(self, step: int, cost: StepCost) -> bool:
        """A step is done; True if it was its grant's last, which :meth:`close` ends."""
        self._add(cost)
        return bool(self._grants) and step + 1 == self._grants[0].stop

    def close(
        self,
        *,
        backward_passes: int,
        max_samples: int = 0,
        parameter_norm: float = 0.0,
        scalars: Scalars = (),
    ) -> None:
        """The grant under way is done, and its report due; see `StepsDone`."""
        assert self._due is None, "the last report has not been said"
        grant, measured = self._grants.popleft(), self._measured
        self._measured = _Measured()
        self._due = StepsDone(
            rank=self._rank,
            epoch=self._epoch,
            start=grant.start,
            stop=grant.stop,
            samples=measured.samples,
            busy_s=measured.busy_s,
            data_wait_s=measured.data_wait_s,
            sync_wait_s=measured.sync_wait_s,
            warm=measured.warm,
            backward_passes=backward_passes,
            max_samples=max_samples,
            transfer_s=measured.transfer_s,
            parameter_norm=parameter_norm,
            scalars=scalars,
            is_finite=self._numbers.is_finite and not math.isnan(parameter_norm),
            broken=self._numbers.broken,
        )

    def take(self) -> StepsDone | None:
        """What is to be said now: the next backward pass begins, or nothing will."""
        due, self._due = self._due, None
        return due

    def left(
        self,
        step: int,
        cost: StepCost | None,
        scalars: Scalars,
        *,
        passes: int,
        apart: str = "",
    ) -> EpochLeft:
        """The loop has broken off after so many steps: what was not said of them.

        Args:
            step: how many.
            cost: of the last one, None if there was none.
            scalars: what was logged since the last report.
            passes: backward passes of the run so far.
            apart: why this rank cannot take part in later ones, if it cannot.
        """
        if cost is not None:
            self._add(cost)
        measured, self._measured = self._measured, _Measured()
        return EpochLeft(
            rank=self._rank,
            epoch=self._epoch,
            step=step,
            samples=measured.samples,
            busy_s=measured.busy_s,
            data_wait_s=measured.data_wait_s,
            sync_wait_s=measured.sync_wait_s,
            transfer_s=measured.transfer_s,
            scalars=scalars,
            is_finite=self._numbers.is_finite,
            broken=self._numbers.broken,
            passes=passes,
            apart=apart,
        )

    def _add(self, cost: StepCost) -> None:
        measured = self._measured
        measured.samples += cost.samples
        measured.busy_s += cost.busy_s
        measured.data_wait_s += cost.data_wait_s
        measured.transfer_s += cost.transfer_s
        measured.sync_wait_s += cost.sync_wait_s
        measured.warm &= cost.warm

    def void(self) -> None:
        """The group has changed: what was granted, and begun, is granted anew."""
        self._grants.clear()
        self._measured = _Measured()
