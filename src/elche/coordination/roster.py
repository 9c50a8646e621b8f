"""Generations: who is being waited for to form the group of the next one. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elche.coordination.messages import Join, Regrouped
from elche.errors import ProtocolError


class Roster:
    """The generation under way, and who has not arrived in it.

    Attributes:
        generation: its number; each change of the membership begins the next.
        newcomers: ranks that wait to be taken in.
        pending: members that have not formed the group yet.
        reduced: the last window whose result each member holds, as they said.
    """

    def __init__(self) -> None:
        self.generation = -1
        self.newcomers: list[Join] = []
        self.pending: set[int] = set()
        self.reduced: dict[int, int] = {}

    def change(self, members: Iterable[int]) -> None:
        """Begins the next generation."""
        self.generation += 1
        self.pending = set(members)
        self.reduced = {}

    def withdraw(self, rank: int) -> bool:
        """A rank is gone; True if it waited to be taken in, and does no more."""
        before = len(self.newcomers)
        self.newcomers = [join for join in self.newcomers if join.rank != rank]
        return len(self.newcomers) < before

    def take_newcomers(self) -> list[Join]:
        """Ranks that wait to be taken in; they wait no more."""
        waiting, self.newcomers = self.newcomers, []
        return waiting

    def take(self, event: Regrouped) -> bool:
        """A member is there; True when it was the last one.

        Raises:
            ProtocolError: it has said so before.
        """
        if event.generation < self.generation:
            return False  # the membership has changed again meanwhile
        if event.rank not in self.pending or event.generation > self.generation:
            raise ProtocolError(f"rank {event.rank} is in no such group: {event}")
        self.pending.discard(event.rank)
        self.reduced[event.rank] = event.reduced
        return not self.pending
