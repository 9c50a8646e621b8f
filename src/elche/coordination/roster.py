"""Generations: the ranks that form the group of the next one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elche.coordination.protocol.events import Join, Regrouped
from elche.coordination.protocol.instructions import Abort, Regroup
from elche.coordination.protocol.messages import Runs
from elche.errors import ProtocolError


class Roster:
    """The generation under way, and who has not arrived in it.

    Attributes:
        generation: its number; each change of the membership begins the next.
        newcomers: ranks that wait to be taken in.
        ready: those of them that are, where that is done when an epoch is cut.
        fresh: members that have been taken in, until they train.
        pending: members that have not formed the group yet.
        reduced: the last window whose result each member holds, as they said.
        lost: as in `Regrouped`, the same of all members.
    """

    def __init__(self) -> None:
        self.generation = -1
        self.newcomers: list[Join] = []
        self.ready: set[int] = set()
        self.fresh: set[int] = set()
        self.pending: set[int] = set()
        self.reduced: dict[int, int] = {}
        self.lost: Runs = ()

    def change(self, members: Iterable[int]) -> None:
        """Begins the next generation."""
        self.generation += 1
        self.pending = set(members)
        self.reduced = {}
        self.lost = ()

    def regroup(
        self,
        ranks: Iterable[int],
        *,
        left: tuple[int, ...] = (),
        joined: tuple[int, ...] = (),
        in_order: bool = False,
    ) -> list[Regroup]:
        """Tells these ranks to form the group of this generation."""
        word = Regroup(
            rank=0,
            generation=self.generation,
            left=left,
            joined=joined,
            in_order=in_order,
        )
        return [replace(word, rank=rank) for rank in sorted(ranks)]

    def turn_away(self) -> list[Abort]:
        """The run is over: ranks that wait to join it are told."""
        return [
            refusal(join.rank, f"the run ended before rank {join.rank} could join it")
            for join in self.take_newcomers()
        ]

    def awaits(self, rank: int) -> bool:
        """Returns True if a rank waits to be taken in."""
        return any(join.rank == rank for join in self.newcomers)

    def withdraw(self, rank: int) -> None:
        """A rank that waited to be taken in is gone."""
        self.newcomers = [join for join in self.newcomers if join.rank != rank]
        self.ready.discard(rank)

    def take_newcomers(self) -> list[Join]:
        """Ranks that wait to be taken in; they wait no more."""
        waiting, self.newcomers = self.newcomers, []
        self.ready.clear()
        return waiting

    def take_ready(self) -> list[Join]:
        """Those of them whose loops have begun: they are fresh members."""
        ready, self.ready = self.ready, set()
        self.fresh |= ready
        joins = [join for join in self.newcomers if join.rank in ready]
        self.newcomers = [join for join in self.newcomers if join.rank not in ready]
        return joins

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
        is_same = not event.lost or event.reduced in self.reduced.values()
        if self.reduced and not (is_same and event.lost == self.lost):
            raise ProtocolError(
                f"ranks have settled a death differently: {self.reduced} without "
                f"{self.lost}, but {event}"
            )
        self.reduced[event.rank], self.lost = event.reduced, event.lost
        return not self.pending


def refusal(rank: int, difference: str) -> Abort:
    """The rejection of a newcomer that does not fit; the run goes on."""
    return Abort(rank=rank, reason=difference, kind="mismatch")
