"""Membership of a run: joins, losses, late ranks, departures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elche.coordination.agreement import what_differs
from elche.coordination.departures import RankState
from elche.coordination.policy import Member
from elche.coordination.protocol.events import (
    Event,
    Failed,
    Interrupted,
    Join,
    JoinReady,
    Left,
    RankLost,
    Tick,
)
from elche.coordination.protocol.instructions import Instruction, Welcome
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.roster import Roster, refusal
from elche.errors import ProtocolError

_OF_NO_RANK = Interrupted, Tick


class Membership:
    """The ranks of one run after another: when all have left, they may begin again.

    Args:
        world_size: ranks that a run begins with.
        grows: ranks that are not of the run may join it where an epoch is cut.

    Attributes:
        ranks: that are in the run now, also those that have left it in order.
        left: those of them that have, with what each said.
        min_ranks: while fewer are there an epoch that was cut is not gone on with.
        roster: the generations of their group.
    """

    def __init__(self, world_size: int, *, grows: bool) -> None:
        self._world_size = world_size
        self._grows = grows
        self.ranks = set(range(world_size))
        self.left: dict[int, Left] = {}
        self.min_ranks = 1
        self.roster = Roster()
        self._first_generation = 0
        self._survives = False
        self._joins: dict[int, Join] = {}
        self._early: list[Join] = []

    @property
    def is_finished(self) -> bool:
        """True if every rank has left."""
        return self.left.keys() >= self.ranks

    @property
    def is_complete(self) -> bool:
        """True if all ranks that the run begins with have joined."""
        return len(self._joins) >= self._world_size

    @property
    def is_joining(self) -> bool:
        """True if some have, and are waiting for the others."""
        return 0 < len(self._joins) < self._world_size

    @property
    def is_awaited(self) -> bool:
        """True if a rank waits for the next run."""
        return bool(self._early)

    @property
    def has_changed(self) -> bool:
        """True if other ranks take part than at the start."""
        return self.roster.generation > self._first_generation

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return sorted(self.ranks - set(self._joins))

    def hears(self, event: Event) -> bool:
        """True if events of this rank count; one that waits to join may go."""
        if isinstance(event, _OF_NO_RANK) or event.rank in self.ranks:
            return True
        if isinstance(event, (Failed, JoinReady, Left, RankLost)):
            return self.roster.awaits(event.rank)
        return isinstance(event, Join) and self._grows and event.rank >= 0

    def state_of(self, rank: int) -> RankState:
        """State of a rank whose events count."""
        if rank in self.left:
            return RankState.LEFT
        if rank in self.roster.fresh:
            return RankState.NEW
        return RankState.MEMBER if rank in self.ranks else RankState.WAITING

    def comes_early(self, join: Join) -> bool:
        """True if a rank joins too early for the next run, and waits."""
        is_early = join.rank in self.left
        if is_early:
            self._early.append(join)
        return is_early

    def take(self, join: Join) -> str:
        """A rank of the run joins; returns what does not fit, or "".

        Raises:
            ProtocolError: it has joined already.
        """
        if join.rank in self._joins:
            raise ProtocolError(f"rank {join.rank} cannot join again")
        if join.world_size != self._world_size:
            return (
                f"rank {join.rank} has world size {join.world_size}, expected the "
                f"coordinator's, {self._world_size}"
            )
        self._joins[join.rank] = join
        return ""

    @property
    def devices(self) -> dict[int, str]:
        """Device of each rank that has joined."""
        return {rank: join.device for rank, join in self._joins.items()}

    def joined(self) -> list[Join]:
        """Join messages of the ranks that the run begins with, in order."""
        return [self._joins[rank] for rank in range(self._world_size)]

    def begin(self, *, survives: bool) -> list[Welcome]:
        """All are there and agree: the first generation begins.

        Args:
            survives: the run continues without ranks that are lost.
        """
        self._survives = survives
        self.roster.generation += 1
        self._first_generation = self.roster.generation
        common = self._common(self.joined())
        return [replace(common, rank=rank) for rank in sorted(self.ranks)]

    def begin_again(self) -> list[Join]:
        """The run is over; returns what ranks have said that wait for the next one."""
        self._joins.clear()
        self.left.clear()
        self.ranks = set(range(self._world_size))
        early, self._early = self._early, []
        return early

    def lose(self, rank: int) -> list[Instruction]:
        """A rank is gone: the others form a new group without it."""
        self.ranks.discard(rank)
        self.roster.fresh.discard(rank)
        self.roster.change(self.ranks)
        return [*self.roster.regroup(self.ranks, left=(rank,))]

    def leave(self, event: Left) -> list[Instruction]:
        """A rank goes in order: a group that forms is formed without it."""
        self.left[event.rank] = event
        stay = self.ranks - self.left.keys()
        if event.rank not in self.roster.pending or not stay:
            return []
        self.roster.change(stay)
        return [*self.roster.regroup(stay, left=(event.rank,), in_order=True)]

    def greet(self, join: Join, why_closed: str) -> list[Instruction]:
        """A rank asks to join where an epoch is cut: it waits, if it may and fits.

        Args:
            join: what it says of itself.
            why_closed: why no rank can join; "" if one can.
        """
        if join.version != PROTOCOL_VERSION:
            why_closed = (
                f"it uses protocol version {join.version}, not {PROTOCOL_VERSION}"
            )
        if why_closed:
            said = f"rank {join.rank} cannot join the run under way: {why_closed}"
            return [refusal(join.rank, said)]
        difference = what_differs([next(iter(self._joins.values())), join])
        if difference:
            return [refusal(join.rank, difference)]
        joins = [*(self._joins[rank] for rank in sorted(self.ranks)), join]
        self.roster.newcomers.append(join)
        return [replace(self._common(joins), rank=join.rank)]

    @property
    def is_short(self) -> bool:
        """True if fewer ranks are there than there must be."""
        return len(self.ranks) < self.min_ranks

    @property
    def awaits_cut(self) -> bool:
        """True if ranks wait to be taken in, or are waited for, in a cut epoch."""
        is_wanted = bool(self.roster.ready) or self.is_short
        return is_wanted and not (self.left or self.roster.pending)

    def admit_ready(self) -> tuple[list[Join], list[Instruction]]:
        """Takes in those that wait and are ready; returns them, and what is said."""
        joins, before = self.roster.take_ready(), sorted(self.ranks)
        self._joins.update({join.rank: join for join in joins})
        new = tuple(join.rank for join in joins)
        self.ranks.update(new)
        self.roster.change(self.ranks)
        told = self.roster.regroup(before, joined=new)
        told += self.roster.regroup(new, joined=tuple(sorted(self.ranks)))
        return joins, [*told]

    def check(self) -> None:
        """Asserts that all have joined, and that the group is of members."""
        assert len(self.ranks) <= len(self._joins)
        assert not self.roster.pending - self.ranks

    def _common(self, joins: Sequence[Join]) -> Welcome:
        return Welcome(
            rank=0,
            generation=self.roster.generation,
            devices=tuple(join.device for join in joins),
            memory_bytes=tuple(join.memory_bytes for join in joins),
            survives=self._survives,
        )


def as_members(joins: Sequence[Join]) -> list[Member]:
    """Members as a policy knows them."""
    return [Member(join.rank, join.device, join.horizon_batches) for join in joins]
