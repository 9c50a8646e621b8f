"""Messages from rank to rank, concurrent with a group's collectives.

gloo's point-to-point transfers have tags. Unlike collectives, they need not begin in
the same order on every rank, so a rank can answer a message at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableSet, Sequence
from datetime import timedelta
from typing import Any

import torch

from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError

POLL_S = 5e-4
"""Pause (s) between two polls of a wait."""


class Peers:
    """Messages over a group's gloo connections.

    Args:
        group: process group whose deadline and error handling apply.

    Attributes:
        under_way: exchanges of this group with a message in flight.
        rank: this rank's place in the group.
        world_size: number of ranks in the group.
        ranks: ranks in the run by place in the group, for errors.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.under_way: MutableSet[Any] = group.exchanges
        self.rank = group.rank
        self.world_size = group.world_size
        self.ranks: Sequence[int] = group.ranks

    def send_async(self, memory: torch.Tensor, to: int, tag: int) -> Any:
        """Begins to send over gloo.

        Raises:
            CommunicationError: the connection has failed.
        """
        return self._begun("send", memory, to, tag)

    def receive_async(self, memory: torch.Tensor, source: int, tag: int) -> Any:
        """Begins to receive over gloo; fails as :meth:`send_async` does."""
        return self._begun("recv", memory, source, tag)

    def wait(self, work: Any, what: str) -> None:
        """Waits inside gloo, at most as long as the group's deadline."""
        try:
            work.wait(timedelta(seconds=self._group.timeout_s))
        except RuntimeError as error:
            raise CommunicationError(
                f"{what} failed on rank {self.ranks[self.rank]}: {error}"
            ) from error
        self._group.transfers.pop(work, None)

    def poll_until(self, ready: Callable[[], bool], what: str) -> None:
        """Polls instead of waiting in gloo, which ends only with the connection.

        Raises:
            CommunicationError: a rank is dead; the group's check may raise others.
        """

        def polled() -> bool:
            is_ready = ready()
            if not is_ready:
                time.sleep(POLL_S)
            return is_ready

        self._group.wait_until(polled, what)

    def explained(self, error: CommunicationError) -> Exception:
        """Returns the error with the reason that the group finds out."""
        return self._group.on_failure(str(error), ())

    def _begun(self, call: str, memory: torch.Tensor, peer: int, tag: int) -> Any:
        try:
            work = getattr(self._group.point_to_point, call)([memory], peer, tag)
        except RuntimeError as error:
            raise CommunicationError(
                f"{call} between ranks {self.ranks[self.rank]} and "
                f"{self.ranks[peer]} failed: {error}"
            ) from error
        self._group.transfers[work] = memory
        return work
