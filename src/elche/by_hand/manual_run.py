"""Runs without a loader: a process group, barriers, a clean end.

For loops that reduce by hand (`elche.Replica`). The coordinator is that of
`elche.setup`, but it only handles joins, failures, barriers and leaves, no epochs.
"""

from __future__ import annotations

from typing import final

import torch

from elche.comm.tensors.row_gather import RowGather
from elche.comm.transport.process_group import Group
from elche.config import RunConfig
from elche.coordination.agreement import Settings
from elche.coordination.protocol.events import BarrierReached, Join, Left
from elche.coordination.protocol.instructions import BarrierPassed, Welcome
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.devices import choice
from elche.runtime.process.connect import connect
from elche.runtime.process.environment import Placement
from elche.runtime.process.shutdown import failure_of
from elche.runtime.process.worker import Worker
from elche.runtime.rank_settings import installed_versions


@final
class ManualRun:
    """A run without a loader on one rank; made by :meth:`start`.

    Args:
        group: process group of all ranks.
        worker: this rank's worker; None in a single-rank run, which needs no other
            process and no socket.
    """

    def __init__(self, group: Group, worker: Worker | None) -> None:
        self.group = group
        self._worker = worker
        self._barriers = 0
        self._rows: RowGather | None = None

    @staticmethod
    def start(placement: Placement, config: RunConfig) -> ManualRun:
        """Joins the other ranks and forms a group.

        Raises:
            MismatchError: ranks disagree about the settings.
            CommunicationError: a rank did not join in time.
        """
        choice.use(placement.device)
        if placement.world_size == 1:
            return ManualRun(Group.alone(config.timeout_s), None)
        placement, channel = connect(placement, config.timeout_s)
        worker = Worker(placement, channel, config.timeout_s)
        try:
            worker.send(_join(placement, config))
            welcome = worker.expect(Welcome, "all ranks to join")
            worker.groups.form(welcome, config.transport.kind)
        except BaseException as error:
            worker.close(failure_of(worker.rank, error))
            raise
        return ManualRun(worker.group, worker)

    def barrier(self) -> None:
        """Waits until every rank has reached this barrier.

        Raises:
            RemoteRankError: another rank failed or left.
        """
        if self._worker is None:
            return
        self._barriers += 1
        name = f"barrier {self._barriers}"
        self._worker.send(BarrierReached(rank=self._worker.rank, name=name))
        self._worker.expect(BarrierPassed, f"all ranks at {name}")

    def gather_rows(self, tensor: torch.Tensor, weight: float) -> torch.Tensor:
        """Gathers the rows of all ranks; `weight` is this rank's loss weight."""
        if self._worker is None:
            return tensor
        if self._rows is None:
            self._rows = RowGather(self._worker.groups.side())
        return self._rows.gather(tensor, weight)

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the run, and reports the error, if any, to the other ranks.

        The group is unusable afterwards.
        """
        worker, self._worker = self._worker, None
        if worker is not None:
            rank = worker.rank
            worker.close(Left(rank=rank) if error is None else failure_of(rank, error))


def _join(placement: Placement, config: RunConfig) -> Join:
    """Builds this rank's `Join` message, with its settings but no model."""
    return Join(
        rank=placement.rank,
        version=PROTOCOL_VERSION,
        world_size=placement.world_size,
        settings=Settings(config=config, software=installed_versions()).as_pairs(),
        tensors=(),
        device=placement.device_name,
        horizon_batches=0,
    )
