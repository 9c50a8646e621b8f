"""Groups of ranks that take part in the steps of ``sync``, on one rank.

The coordinator decides which ranks take part. Excluded ranks copy model and optimizers
at the epoch's end, and so do ranks whose loop has left it early. After a death the
survivors agree in their next group on the step at which they continue. New ranks join
between two parts of an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import final

import torch

from elche.comm.gradients.part_weights import StepPart
from elche.comm.gradients.reducer import GradientReducer
from elche.comm.transport.process_group import Group, gather_texts
from elche.coordination.protocol.events import Regrouped
from elche.coordination.protocol.instructions import LeaveOut
from elche.coordination.sync.lost_ranks import LostRanks, StepPlace, settle
from elche.errors import ConfigError
from elche.runtime.sync.resume_sync import (
    broadcast_from,
    take_gradients,
    take_schedules,
)
from elche.runtime.training import Training
from elche.runtime.watch.observer import LoopObserver
from elche.runtime.windows.regrouping import Regrouping, gathered

logger = logging.getLogger(__name__)

APART = StepPlace(-1, 0, -1)
"""Position of a rank that is excluded from steps."""


@final
class StepGroups:
    """Forms the groups of active ranks, and copies the model to the others.

    Attributes:
        lost: ranks that have died in the current part of the epoch.
        is_apart: some living ranks are excluded from steps.
        late_error: this rank's loop left an epoch and cannot begin the next one.
        unknown: returns state of this rank that cannot be copied to another, or "".
    """

    def __init__(
        self, training: Training, observer: LoopObserver, regrouping: Regrouping
    ) -> None:
        self._training = training
        self._observer = observer
        self._regrouping = regrouping
        self._worker = worker = regrouping.worker
        self._synchroniser = regrouping.synchroniser
        self._excluded: tuple[int, ...] = ()
        self._changes = 0  # in this generation; the same on all
        self._is_new = worker.is_new  # or others are, until all reduce with them
        self._members = list(worker.members)
        self.lost = LostRanks()
        self.is_apart = False
        self.late_error: ConfigError | None = None
        self.unknown = observer.uncarried

    @property
    def has_lost(self) -> bool:
        """True if ranks have died since the part of the epoch began."""
        return not set(self._members) <= set(self._worker.members)

    def begin_part(self) -> None:
        """Begins an epoch, or the next part of it."""
        self._is_new = False  # all are in one group, of windows perhaps
        self._members = list(self._worker.members)
        self.lost.begin_part()

    def take_back(self, *, rebuilds: bool) -> None:
        """Readmits excluded ranks at the start of a part, if a rank has died.

        Args:
            rebuilds: the reducer is rebuilt with all ranks now.
        """
        if self.is_apart and not rebuilds:
            self._synchroniser.share_with(self._worker.group)
        if self.is_apart or rebuilds:
            self._excluded, self.is_apart = (), False

    def rebuild_with_all(self, group: Group) -> None:
        """Rebuilds the reducer with all ranks of a group that ranks have joined."""
        self._excluded, self._changes = (), 0
        self._synchroniser.group = group
        self._synchroniser.build()

    def exclude(self, instruction: LeaveOut) -> GradientReducer:
        """Applies a new exclusion of ranks; returns the reducer to be used."""
        if instruction.reason and self._worker.place == 0:
            self._regrouping.notifications.emit(f"elche: {instruction.reason}")
        if instruction.left_out != self._excluded:
            self._excluded = instruction.left_out
            self._changes += 1
            self._worker.is_cold = True  # first sums in a group take longer
            group = self._worker.groups.without(instruction.left_out, self._changes)
            self._synchroniser.share_with(group)
        assert self._synchroniser.reducer is not None
        return self._synchroniser.reducer

    @property
    def _apart(self) -> list[int]:
        """Living ranks that are excluded."""
        return [rank for rank in self._excluded if rank in self._worker.members]

    def meet(self, call: str) -> None:
        """Records a call inside an epoch that every rank must make.

        Raises:
            ConfigError: some ranks are excluded, and do not make it.
        """
        self._observer.meets(call)
        if self._apart:
            raise ConfigError(
                f"{call} inside the loop waits for every rank, and ranks "
                f"{self._apart} are excluded from steps; call it between epochs, or "
                "keep all ranks with leave_out=False"
            )

    def adopt(self, source: int, epoch: int) -> None:
        """Adopts the model and optimizers of one rank, with all ranks.

        Raises:
            ConfigError: optimizers have stepped on some ranks only.
        """
        optimizers, worker = self._observer.optimizers(), self._worker
        group, place = worker.group, list(worker.group.ranks).index(source)
        counts = gather_texts(group, str(len(optimizers)), "counting optimizers")
        if len(set(counts)) > 1:
            raise ConfigError(
                f"ranks left epoch {epoch} after different steps, when {counts} "
                "optimizers had stepped; leave it when all of them have, or keep all "
                "ranks in every step with leave_out=False"
            )
        schedulers = self._observer.carried_schedulers
        followed = {id(scheduler.optimizer) for scheduler in schedulers}
        others = [each for each in optimizers if id(each) not in followed]
        before = _rates(others)
        broadcast_from(group, self._training.model, optimizers, place)
        take_gradients(group, self._synchroniser.parameters, place)
        take_schedules(group, schedulers, place)
        for copy in self._training.copies:
            broadcast_from(group, copy, [], place)
        if worker.rank in self._excluded:
            return
        if worker.rank == source and not self._excluded:
            logger.info(
                "ranks left epoch %d after different steps: all now hold the model "
                "and the optimizer of rank %d; state that elche does not see (a "
                "scheduler, a GradScaler, an average of weights) was not copied",
                *(epoch, source),
            )
        if before != _rates(others):
            self.late_error = ConfigError(
                f"rank {worker.rank} left epoch {epoch} earlier than rank {source}, "
                "and a learning rate moved in between: its scheduler is behind; leave "
                "an epoch after the same step on every rank if another follows, or "
                "step schedulers between epochs"
            )

    def settle(
        self,
        group: Group,
        place: StepPlace,
        alive: Callable[[StepPart], StepPart] = lambda part: part,
    ) -> None:
        """Settles the interrupted pass, once all ranks have formed their group.

        Where ranks have joined, between two parts of an epoch, no pass is open: the
        reducer is rebuilt with them.

        Args:
            group: the next group.
            place: position of this rank.
            alive: removes dead ranks from this rank's part of a step.

        Raises:
            RankLostError: another rank has died; to be called again.
        """
        if self._worker.rank in self._excluded:
            place = APART
        *columns, are_new = gathered(group, *place, self._is_new)
        if any(are_new):
            self._is_new = True
            self.rebuild_with_all(group)
            self._is_new = self.is_apart = False
        else:
            table = [StepPlace(*row) for row in zip(*columns, strict=True)]
            self._settle(table, place, alive)
        self._regrouping.log_members()

    def _settle(
        self,
        table: Sequence[StepPlace],
        place: StepPlace,
        alive: Callable[[StepPart], StepPart],
    ) -> None:
        """Settles the interrupted pass by the positions of all ranks of the group."""
        members = self._worker.members
        found = settle([each for each in table if each != APART])
        self.lost.take(set(self._members) - set(members), found)
        absent = [members[at] for at, each in enumerate(table) if each == APART]
        self.is_apart |= bool(absent)
        if not self._regrouping.is_building:
            sharing = self._worker.groups.without(absent, 0)
            lacks = place.passes < found.passes
            reducer = self._synchroniser.reducer
            if sharing is not None and reducer is not None:
                reducer.continue_in(sharing, found.source, alive, lacks=lacks)
        self.lost.confirm()

    def report_regrouped(self, epoch: int) -> None:
        """Reports the new group, and the steps settled in it."""
        lost = self.lost
        self._worker.send(
            Regrouped(
                rank=self._worker.rank,
                generation=self._worker.groups.generation,
                epoch=epoch,
                reduced=lost.last if lost.is_settled else -1,
                lost=lost.to_wire(),
            )
        )


def _rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    groups = [group for each in optimizers for group in each.param_groups]
    return [float(group["lr"]) for group in groups]
