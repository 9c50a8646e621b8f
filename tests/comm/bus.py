"""A group of ranks in one process: a collective ends when the last rank has begun it.

The calls of the ranks are made one after the other, in any order that real ranks could
make them in; a wait for a rank that has not come yet fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from elche.comm.model_buffers import known_buffers
from elche.comm.transport.process_group import Group, late_error
from elche.errors import CommunicationError
from tests.comm.thread_group import Shared, ThreadGroup, Work


class Bus:
    """What the ranks of one group share."""

    def __init__(self, world_size: int) -> None:
        self.shared = Shared(world_size, deadline_s=0.0)

    def group(self, rank: int) -> Group:
        return cast(Group, Member(rank, self.shared))

    def groups(self) -> list[Group]:
        return [self.group(rank) for rank in range(self.shared.world_size)]


class Member(ThreadGroup):
    """One rank's end of a bus."""

    def wait(self, work: Work, what: str) -> None:
        if not work.is_completed():
            # As gloo does: what was half reduced is lost.
            work.tensor.fill_(float("nan"))
            raise CommunicationError(f"{what} failed on rank {self.rank}: nobody came")
        super().wait(work, what)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        if what == known_buffers.AGREEING:
            # A row per rank: they are built one after the other.
            tensor.copy_(tensor[self.rank].clone().expand_as(tensor))
            return
        super().all_reduce(tensor, what)

    def broadcast(self, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Nothing that the tests look at."""

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        if not ready():
            raise late_error(what, missing() if missing is not None else ())
