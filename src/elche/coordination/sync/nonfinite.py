"""NaN/Inf detection under ``sync``, attributed to a rank. Pure.

All ranks take the same step, so NaN parameters are NaN on all of them. They do not show
which rank's gradient caused it: the reduced gradient is non-finite everywhere. Each
rank therefore checks its own gradients before they are reduced. It reports the first
backward pass since its last finite gradient. Under a GradScaler that happens often and
is harmless: the next step's gradients are finite again. Only if the parameters are NaN
is a rank named: the first with a non-finite gradient. A second pass of a step adds to
the reduced gradients of the first, which are then non-finite on all ranks, so passes
are distinguished. Parameters are distinguished too: passes may be of different parts of
the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from elche.coordination.protocol.events import EpochLeft, StepsDone
from elche.coordination.protocol.messages import OwnPart
from elche.errors import NonFiniteError

PATIENCE_REPORTS = 3
"""Reports by which a rank may lag in detecting NaN, since its device runs behind."""


@final
class NonFiniteRecord:
    """Non-finite gradients of one rank, by time, over all epochs.

    A gradient accumulated across epochs has been reduced, and so is equal on all ranks,
    when the next pass adds to it.

    Attributes:
        is_finite: whether the parameters were finite at the last check.
    """

    def __init__(self) -> None:
        self.is_finite = True
        self._broken: dict[int, OwnPart] = {}

    @property
    def broken(self) -> OwnPart:
        """First part since which its own gradients are non-finite; () if finite."""
        return min(self._broken.values(), default=())

    def gradients(self, part: OwnPart, parameter: int, *, is_finite: bool) -> None:
        """Records the rank's own gradient of a parameter in a backward pass.

        Args:
            part: epoch, step, pass, and samples (first, one past the last) of the
                step's batch.
            parameter: index of the parameter.
            is_finite: whether the gradient is finite.
        """
        if not is_finite:
            self._broken.setdefault(parameter, part)
        else:
            self._broken.pop(parameter, None)


@final
class NonFiniteReports:
    """The ranks' reports of non-finite values in an epoch, or a part of one."""

    def __init__(self) -> None:
        self._broken: dict[int, OwnPart] = {}
        self._lost: dict[int, int] = {}

    def take(self, event: StepsDone | EpochLeft) -> None:
        """Records a rank's report."""
        self._broken[event.rank] = event.broken
        is_lost = not event.is_finite
        self._lost[event.rank] = self._lost.get(event.rank, 0) + 1 if is_lost else 0

    def check(self, epoch: int, members: Iterable[int], *, is_last: bool) -> None:
        """Ends the run if the model's parameters are NaN.

        Args:
            epoch: epoch number.
            members: ranks that hold the same parameters.
            is_last: whether this epoch has no more reports.

        Raises:
            NonFiniteError: the parameters are NaN.
        """
        lost = [self._lost.get(rank, 0) for rank in members]
        late = any(lost) and (is_last or max(lost) >= PATIENCE_REPORTS)
        if late or all(lost):
            raise self._error(epoch)

    def _error(self, epoch: int) -> NonFiniteError:
        broken = {rank: part for rank, part in self._broken.items() if part}
        first = min((part[:3] for part in broken.values()), default=())
        ranks = sorted(rank for rank, part in broken.items() if part[:3] == first)
        began, step = first[:2] if first else (epoch, -1)
        where = f"step {step}" if began == epoch else f"step {step} of epoch {began}"
        batches = ((step, step + 1),) if first and began == epoch else ()
        rank = ranks[0] if len(ranks) == 1 else None
        part: OwnPart = ()
        if rank is not None:
            start, stop = broken[rank][3:]
            part = (start, stop) if batches else ()
            who = (
                f"the first gradient that was not finite was rank {rank}'s own, in "
                f"{where}, of samples {start} to {stop - 1} of its batch"
            )
        elif ranks:
            who = (
                f"ranks {ranks} first had gradients that were not finite in the "
                f"same {where}, so the learning rate may be at fault rather than "
                "a sample"
            )
        else:
            who = "no rank has seen a gradient of its own that was not finite"
        return NonFiniteError(
            f"the model's parameters have become NaN in epoch {epoch}; {who}. Policy "
            "sync cannot discard the update of one rank: look at the data, the loss "
            "and the learning rate, use a GradScaler, or choose a policy of windows "
            "('cadence', 'async'), which discards updates that are not finite",
            rank,
            batches,
            part,
        )
