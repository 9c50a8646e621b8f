"""The next group of a run of steps that has lost ranks, or takes in new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch

from elche.comm.gradients.part_weights import StepPart
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.events import Regrouped
from elche.coordination.sync.lost_ranks import LostRanks, StepPlace, settle
from elche.runtime.process.worker import Worker
from elche.runtime.sync.step_members import StepMembers
from elche.runtime.windows.regrouping import WHAT, Regrouping
from elche.runtime.windows.synchroniser import Synchroniser

APART = StepPlace(-1, 0, -1)
"""Position of a rank that is excluded from steps."""


@final
class StepRegrouping:
    """This rank's part in forming the next group under ``sync``.

    Args:
        worker: this rank's shell.
        synchroniser: reduces its gradients.
        regrouping: what windows do; forms the group, and says who has died.
        step_members: forms the groups of those who take part in steps.

    Attributes:
        lost: who has died in the part of an epoch under way.
        is_apart: ranks that are left out of steps were among those who live.
    """

    def __init__(
        self,
        worker: Worker,
        synchroniser: Synchroniser,
        regrouping: Regrouping,
        step_members: StepMembers,
    ) -> None:
        self._worker = worker
        self._synchroniser = synchroniser
        self._regrouping = regrouping
        self._step_members = step_members
        self._is_new = worker.is_new  # or others are, until all reduce with them
        self._members = list(worker.members)
        self.lost = LostRanks()
        self.is_apart = False

    @property
    def has_lost(self) -> bool:
        """True if any have died since the part of an epoch began."""
        return not set(self._members) <= set(self._worker.members)

    def begin_part(self) -> None:
        """The epoch, or the next part of it, begins."""
        self._is_new = False  # all are in one group, of windows perhaps
        self._members = list(self._worker.members)
        self.lost.begin_part()

    def form(
        self,
        place: StepPlace,
        alive: Callable[[StepPart], StepPart],
    ) -> None:
        """Forms the group of those who live, and settles the pass under way.

        Args:
            place: where this rank is.
            alive: its part of a step without those that have died.

        Raises:
            RankLostError: another rank has died; to be called again.
        """
        self.settle(self._regrouping.meet(wants_keys=False), place, alive)

    def settle(
        self,
        group: Group,
        place: StepPlace,
        alive: Callable[[StepPart], StepPart] = lambda part: part,
    ) -> None:
        """The same, once all have met in their group.

        Where ranks have joined, between two parts of an epoch, nothing is under way:
        what reduces gradients is built anew with them.
        """
        regrouping = self._regrouping
        rows = torch.zeros(group.world_size, 4, dtype=torch.int64, device="cpu")
        if self._synchroniser.is_left_out:
            place = APART
        rows[group.rank] = torch.tensor((*place, self._is_new), device="cpu")
        group.all_reduce(rows, WHAT)
        *columns, are_new = rows.T.tolist()
        self._is_new = any(are_new)
        if self._is_new:
            self._step_members.begin_anew(group)
            self._is_new = self.is_apart = False
        else:
            self._settle(zip(*columns, strict=True), place, alive)
        regrouping.say()

    def _settle(
        self,
        rows: Iterable[Sequence[int]],
        place: StepPlace,
        alive: Callable[[StepPart], StepPart],
    ) -> None:
        """Settles the pass under way by where all ranks of the new group are."""
        worker = self._worker
        table = [StepPlace(*row) for row in rows]
        found = settle([each for each in table if each != APART])
        self.lost.take(set(self._members) - set(worker.members), found)
        left_out = [
            worker.members[at] for at, each in enumerate(table) if each == APART
        ]
        self.is_apart |= bool(left_out)
        if not self._regrouping.is_building:
            self._synchroniser.go_on_in(
                worker.groups.without(left_out, 0),
                found.source,
                alive,
                lacks=place.passes < found.passes,
            )
        self.lost.confirm()

    def say_regrouped(self, epoch: int) -> None:
        """Reports the group and what was settled in it."""
        worker, lost = self._worker, self.lost
        self._worker.send(
            Regrouped(
                rank=worker.rank,
                generation=worker.groups.generation,
                epoch=epoch,
                reduced=-1 if lost.last is None else lost.last,
                lost=lost.to_wire(),
            )
        )
