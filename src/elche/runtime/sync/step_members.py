"""Ranks that take part in the steps of ``sync``, as one rank carries it out.

Which ones the coordinator decides. Those left out take over model and optimizers when
the epoch ends, as do ranks whose loop has left it early.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from elche.comm.gradients.reducer import GradientReducer
from elche.comm.transport.process_group import Group, gather_texts
from elche.coordination.protocol.instructions import LeaveOut
from elche.errors import ConfigError
from elche.runtime.process.worker import Worker
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.sync.resume_sync import (
    broadcast_from,
    take_gradients,
    take_schedules,
)
from elche.runtime.training import Training
from elche.runtime.watch.observer import LoopObserver
from elche.runtime.windows.synchroniser import Synchroniser

logger = logging.getLogger(__name__)


class StepMembers:
    """Forms the groups of those who take part, and brings the others up to date.

    Args:
        worker: this rank's shell.
        training: what is trained.
        synchroniser: reduces its gradients.
        observer: what is seen of this rank's loop.
        notifications: emits lines for the user.

    Attributes:
        late_error: this rank's loop left an epoch and cannot begin the next one.
    """

    def __init__(
        self,
        worker: Worker,
        training: Training,
        synchroniser: Synchroniser,
        observer: LoopObserver,
        notifications: RunNotifications,
    ) -> None:
        self._worker = worker
        self._training = training
        self._synchroniser = synchroniser
        self._observer = observer
        self._notifications = notifications
        self._left_out: tuple[int, ...] = ()
        self._changes = 0
        self.late_error: ConfigError | None = None

    def reset(self) -> None:
        """Resets after the reducer was rebuilt with all ranks."""
        self._left_out = ()

    def begin_anew(self, group: Group) -> None:
        """Ranks have joined: all take part, and reduce in their group; with them."""
        self.reset()
        self._changes = 0  # in this generation; the same on all
        self._synchroniser.build_in(group)

    def leave_out(self, told: LeaveOut) -> GradientReducer:
        """Other ranks take part from now on; returns what reduces their gradients."""
        if told.reason and self._worker.place == 0:
            self._notifications.emit(f"elche: {told.reason}")
        if told.left_out != self._left_out:
            self._left_out = told.left_out
            self._changes += 1
            group = self._worker.groups.without(told.left_out, self._changes)
            self._synchroniser.share_with(group)
        assert self._synchroniser.reducer is not None
        return self._synchroniser.reducer

    @property
    def _apart(self) -> list[int]:
        """Ranks that are left out, and live."""
        return [rank for rank in self._left_out if rank in self._worker.members]

    def meet(self, call: str) -> None:
        """The loop has called inside an epoch what every rank must come to.

        Raises:
            ConfigError: some ranks are left out, and do not.
        """
        self._observer.carried.meets(call)
        if self._apart:
            raise ConfigError(
                f"{call} inside the loop waits for every rank, and ranks "
                f"{self._apart} are left out of steps; call it between epochs, "
                "or keep all ranks with leave_out=False"
            )

    def unknown(self) -> str:
        """State of this rank that cannot be copied to another; "" if there is none.

        Raises:
            ConfigError: a GradScaler has come where ranks are left out, whose loss it
                would scale otherwise.
        """
        if self._apart and self._observer.scaler.has_scaler:
            raise ConfigError(
                f"a GradScaler has begun to step while ranks {self._apart} are "
                "left out, whose own is behind; use it from the first step on, or keep "
                "all ranks with leave_out=False"
            )
        return self._observer.carried.unknown()

    def adopt(self, source: int, epoch: int) -> None:
        """Takes over what one rank trains, with all ranks.

        Raises:
            ConfigError: optimizers have stepped on some ranks only.
        """
        optimizers, worker = self._observer.optimizers(), self._worker
        place = list(worker.group.ranks).index(source)
        counts = gather_texts(worker.group, str(len(optimizers)), "counting optimizers")
        if len(set(counts)) > 1:
            raise ConfigError(
                f"ranks left epoch {epoch} after different steps, when {counts} "
                "optimizers had stepped; leave it when all of them have, or keep all "
                "ranks in every step with leave_out=False"
            )
        schedulers = self._observer.carried.carried_schedulers
        followed = {id(scheduler.optimizer) for scheduler in schedulers}
        others = [each for each in optimizers if id(each) not in followed]
        before = _rates(others)
        broadcast_from(worker.group, self._training.model, optimizers, place)
        take_gradients(worker.group, self._synchroniser.parameters, place)
        if schedulers:
            take_schedules(worker.group, schedulers, place)
        for copy in self._training.copies:
            broadcast_from(worker.group, copy, [], place)
        if worker.rank in self._left_out:
            return
        if worker.rank == source and not self._left_out:
            logger.info(
                "ranks left epoch %d after different steps: all hold the model and the "
                "optimizer of rank %d now; what elche does not see (a scheduler, a "
                "GradScaler, an average of weights) has not moved along",
                *(epoch, source),
            )
        if before != _rates(others):
            self.late_error = ConfigError(
                f"rank {worker.rank} left epoch {epoch} earlier than rank {source}, "
                "and a learning rate moved in between: its scheduler is behind; leave "
                "an epoch after the same step on every rank if another follows, or "
                "step schedulers between epochs"
            )


def _rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    groups = [group for each in optimizers for group in each.param_groups]
    return [float(group["lr"]) for group in groups]
