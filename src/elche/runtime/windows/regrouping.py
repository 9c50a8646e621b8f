"""The next group of a run that has lost ranks or admits new ones.

If a survivor holds the result of the open reduction, which includes the dead rank's
part, the others copy it, and the coordinator commits it. Else the coordinator plans the
reduction again without that part. In shared memory all ranks see the same sums; over
gloo only some ranks may have them. New ranks join where an epoch is cut, and copy the
state of a member.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.errors import CommunicationError, ProtocolError, named_ranks
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.process.worker import Worker
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.windows.synchroniser import Synchroniser

WHAT = "settling a lost rank's open work"


@dataclass(frozen=True, slots=True)
class OpenReduction:
    """The last planned reduction, and its state on this rank.

    Attributes:
        plan: plan of the reduction.
        lacks: its result is not in this rank's model.
        keeps: this rank has trained since it closed that window.
    """

    plan: Reduce
    lacks: bool
    keeps: bool


@final
class Regrouping:
    """This rank's part in forming the next group.

    Args:
        worker: this rank's worker.
        synchroniser: reduces its windows.
        order: order of the samples, drawn by the first rank of the new group.
        send_state: sends the first old rank's state to new ranks, with all ranks.
        notifications: emit lines for the user.
        min_ranks: fewer ranks pause until others have joined.

    Attributes:
        is_building: a rank has not built its reducers for the policy in force, so no
            rank has trained under it, and all build again in the next group.
        has_joined: ranks have joined with the group that was formed last.
    """

    def __init__(
        self,
        worker: Worker,
        synchroniser: Synchroniser,
        order: SampleOrder,
        send_state: Callable[[Group, int, bool], None],
        notifications: RunNotifications,
        *,
        min_ranks: int = 1,
    ) -> None:
        self.worker = worker
        self.synchroniser = synchroniser
        self._order = order
        self._send_state = send_state
        self.notifications = notifications
        self._min_ranks = min_ranks
        self.is_building = self.has_joined = False
        self._logged = list(worker.members)

    def settle(
        self,
        group: Group,
        last: OpenReduction | None = None,
        on_result: Callable[[], None] | None = None,
    ) -> None:
        """Copies a result to ranks that lack it, in the new group.

        Args:
            group: group of the members.
            last: the reduction that may be open.
            on_result: called when this rank has copied the result from another.
        """
        if self.is_building:
            self.log_members()
            return
        worker, sync = self.worker, self.synchroniser.windows
        if sync is None:
            raise ProtocolError(f"rank {worker.rank}: a new group outside windows")
        lacks = last is not None and last.lacks
        lack, hold = gathered(group, lacks, last is not None and not lacks)
        if any(lack) and any(hold):
            if last is None:
                raise ProtocolError(f"rank {worker.rank} has no plan of a reduction")
            source, keeps = hold.index(1), last.keeps
            sync.copy_result(group, source, last.plan, lacks=lacks, keeps=keeps)
            if lacks and on_result is not None:
                on_result()
        sync.reconnect(group)
        self.log_members()

    def meet(self, *, wants_keys: bool = False) -> Group:
        """Forms the members' group, and copies state to the ranks that lack it.

        ``wants_keys``: this rank waits for the positions of an epoch that has begun.

        Raises:
            RankLostError: another rank has died; call it again.
        """
        worker, order = self.worker, self._order
        worker.regroup()
        group, has_keys = worker.group, order.keys is not None
        lack_keys, have_keys, are_new, are_building, share = gathered(
            group,
            *(wants_keys and not has_keys, has_keys, worker.is_new),
            *(self.is_building, worker.groups.can_share),
        )
        self.is_building = any(are_building)
        worker.groups.set_sharing(all(share))
        self.synchroniser.group = group
        if any(lack_keys):
            order.settle(group, have_keys.index(1) if any(have_keys) else None)
        if group.rank == 0 and order.received:  # it has become the first
            order.restore_received()
        self.has_joined = any(are_new)
        if self.has_joined:
            if all(are_new):
                raise CommunicationError("all ranks with the run's state have died")
            order.share_generators(group)
            self._send_state(group, are_new.index(0), worker.is_new)
            worker.is_new = False
        return group

    def log_members(self) -> None:
        """Logs the survivors, on the first rank."""
        now = list(self.worker.members)
        gone = [rank for rank in self._logged if rank not in now]
        new = [rank for rank in now if rank not in self._logged]
        self._logged = now
        if self.worker.place:
            return
        emit, with_all = self.notifications.emit, f"continuing with {named_ranks(now)}"
        if new:
            emit(f"elche: {named_ranks(new)} joined: {with_all}")
        if dead := [rank for rank in gone if rank in self.worker.dead]:
            emit(
                f"elche: {named_ranks(dead)} died: {with_all}; uncommitted batches are "
                "trained again"
            )
        if left := [rank for rank in gone if rank not in dead]:
            emit(f"elche: {named_ranks(left)} left: {with_all}")
        if len(now) < self._min_ranks:
            emit(f"elche: pausing until {self._min_ranks} ranks are there")


def gathered(group: Group, *mine: int) -> list[list[int]]:
    """Gathers these values of all ranks: a list of each, in the order of ranks."""
    rows = torch.zeros(group.world_size, len(mine), dtype=torch.int64, device="cpu")
    rows[group.rank] = torch.tensor(mine, device="cpu")
    group.all_reduce(rows, WHAT)
    found: list[list[int]] = rows.T.tolist()
    return found
