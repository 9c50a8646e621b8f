"""Messages from rank to rank, beside a group's collectives.

gloo's point-to-point transfers carry tags, so that they need not begin in the same
order on every rank, as collectives must: a rank may answer a message whenever it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary

import torch

from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError


class Peers(Protocol):
    """What a route needs of a process group."""

    rank: int
    world_size: int
    ranks: Sequence[int]
    """What the whole group calls them, for messages to people."""

    def send_async(self, memory: torch.Tensor, to: int, tag: int) -> Any:
        """Begins to send; the memory is needed until it has been waited for."""

    def receive_async(self, memory: torch.Tensor, source: int, tag: int) -> Any:
        """Begins to receive."""

    def wait(self, work: Any, what: str) -> None:
        """Waits for either, where others have done their part: nothing ends this wait.

        Raises:
            CommunicationError: it failed.
        """

    def look_out(self, ready: Callable[[], bool], what: str) -> None:
        """Waits until something is there, as far as somebody may end that wait.

        Raises:
            CommunicationError: a rank is dead; other errors say why the run ended.
        """

    def explained(self, error: CommunicationError) -> Exception:
        """The same, and why, if the group can find out; only on the training thread."""


@dataclass(eq=False, slots=True)
class _Pending:
    """A transfer that gloo may still be working on, and the memory that it needs."""

    work: Any
    memory: torch.Tensor


_pending: WeakKeyDictionary[Group, set[_Pending]] = WeakKeyDictionary()
"""What was begun and not waited for. It lives as long as its group: gloo's threads must
not find it gone."""


@final
class GroupPeers:
    """Messages over a group's gloo connections.

    Args:
        group: the group; its deadline and its way to fail hold here too.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending = _pending.setdefault(group, set())
        self.rank = group.rank
        self.world_size = group.world_size
        self.ranks: Sequence[int] = group.ranks

    def send_async(self, memory: torch.Tensor, to: int, tag: int) -> Any:
        """Begins to send over gloo.

        Raises:
            CommunicationError: the connection is broken.
        """
        return self._begun("send", memory, to, tag)

    def receive_async(self, memory: torch.Tensor, source: int, tag: int) -> Any:
        """Begins to receive over gloo; fails as :meth:`send_async` does."""
        return self._begun("recv", memory, source, tag)

    def wait(self, work: Any, what: str) -> None:
        """Waits, at most as long as the group's deadline."""
        try:
            work.work.wait(timedelta(seconds=self._group.timeout_s))
        except RuntimeError as error:
            raise CommunicationError(
                f"{what} failed on rank {self.ranks[self.rank]}: {error}"
            ) from error
        self._pending.discard(work)

    def look_out(self, ready: Callable[[], bool], what: str) -> None:
        """Waits outside of gloo, whose own wait ends with the connection alone."""
        if self._group.is_watched:
            self._group.wait_until(ready, what)

    def explained(self, error: CommunicationError) -> Exception:
        """The same, and why, as the group finds out."""
        return self._group.on_failure(str(error), ())

    def _begun(self, call: str, memory: torch.Tensor, peer: int, tag: int) -> _Pending:
        try:
            work = getattr(self._group.point_to_point, call)([memory], peer, tag)
        except RuntimeError as error:
            raise CommunicationError(
                f"{call} between ranks {self.ranks[self.rank]} and "
                f"{self.ranks[peer]} failed: {error}"
            ) from error
        pending = _Pending(work, memory)
        self._pending.add(pending)
        return pending
