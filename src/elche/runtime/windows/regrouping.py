"""The next group of a run that has lost ranks, formed with all who live.

Survivors settle among themselves what the last group left open: if one of them has the
sums of the reduction under way, the dead rank's part in it, all take them, and the
coordinator commits that; else it plans the reduction anew, without that part. In shared
memory all see the same; over gloo who has the sums hands them to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from elche.comm.averaging.consensus_distance import SyncResult
from elche.coordination.protocol.instructions import Reduce
from elche.errors import ProtocolError
from elche.runtime.data.positions import share_keys
from elche.runtime.process.worker import Worker
from elche.runtime.windows.synchroniser import Synchroniser
from elche.runtime.windows.window_sync import Standing

WHAT = "settling what a lost rank left open"
NOTHING = Standing(is_taken=False, has_sum=False, is_drained=True)


@dataclass(frozen=True, slots=True)
class OpenReduction:
    """The reduction whose plan came last, and what this rank has of it.

    Attributes:
        plan: of the reduction.
        is_taken: its result is in this rank's model.
        is_drained: nothing was trained since this rank's part of it ended.
    """

    plan: Reduce
    is_taken: bool
    is_drained: bool


@final
class Regrouping:
    """This rank's part in forming the next group.

    Args:
        worker: this rank's shell.
        synchroniser: reduces its windows.
        emit: takes a line for the user.

    Attributes:
        keys: of the epoch's positions, as far as this rank has them.
    """

    def __init__(
        self, worker: Worker, synchroniser: Synchroniser, emit: Callable[[str], None]
    ) -> None:
        self._worker = worker
        self._synchroniser = synchroniser
        self._emit = emit
        self._said = list(worker.members)
        self.keys: torch.Tensor | Sequence[Any] | None = None

    def form(
        self, last: OpenReduction | None = None, *, lacks_keys: bool = False
    ) -> SyncResult | None:
        """Forms the group of those who live.

        Args:
            last: the reduction that may be open.
            lacks_keys: this rank has not been told the epoch's positions.

        Returns:
            What the open reduction brought, if this rank has taken it now.

        Raises:
            RankLostError: another rank has died; to be called again. What was settled
                stays settled.
        """
        worker, sync = self._worker, self._synchroniser.windows
        if sync is None:
            raise ProtocolError(f"rank {worker.rank}: no windows, and a new group")
        standing = NOTHING
        if last is not None:
            has_sum = not last.is_taken and sync.has_sum(last.plan)
            standing = Standing(last.is_taken, has_sum, last.is_drained)
        worker.regroup()
        group = worker.group
        has, owes = standing.is_taken or standing.has_sum, not standing.is_taken
        table = torch.zeros(group.world_size, 3, dtype=torch.int64, device="cpu")
        mine = lacks_keys, has, last is not None and owes
        table[group.rank] = torch.tensor(mine, device="cpu")
        group.all_reduce(table, WHAT)
        lack_keys, have, owe = table.T.tolist()
        if any(lack_keys):
            keys = self.keys if group.rank == 0 else None
            plain = keys.tolist() if isinstance(keys, torch.Tensor) else keys
            self.keys = share_keys(group, None if plain is None else list(plain))
        result = None
        if any(owe) and any(have):
            if last is None:
                raise ProtocolError(f"rank {worker.rank} has no plan of a reduction")
            result = sync.settle(group, have.index(1), last.plan, standing)
        sync.reconnect(group)
        self._say()
        return result

    def _say(self) -> None:
        """Who goes on, on the first rank."""
        now = list(self._worker.members)
        gone = [rank for rank in self._said if rank not in now]
        self._said = now
        if gone and self._worker.rank == 0:
            self._emit(
                f"elche: {_named(gone)} died; {_named(now)} go on, and train what was "
                "not committed"
            )


def _named(ranks: Sequence[int]) -> str:
    kind = "rank" if len(ranks) == 1 else "ranks"
    return f"{kind} {', '.join(map(str, ranks))}"
