"""Membership of a run: joins, losses, late ranks, departures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

from elche.coordination.agreement import what_differs
from elche.coordination.policy import Member
from elche.coordination.protocol.events import (
    Event,
    Failed,
    Interrupted,
    Join,
    JoinReady,
    Left,
    RankLost,
    Regrouped,
    Tick,
)
from elche.coordination.protocol.instructions import (
    Abort,
    Instruction,
    Regroup,
    Welcome,
)
from elche.coordination.protocol.messages import PROTOCOL_VERSION, Runs
from elche.errors import ProtocolError, TransitionError

_OF_NO_RANK = Interrupted, Tick


class RankState(Enum):
    """States of a rank, as the membership records them, and the end of its run."""

    WAITING = "waiting"  # newcomer, not admitted to the run yet
    NEW = "new"  # admitted, has not trained yet
    MEMBER = "member"
    LEFT = "left"
    LOST = "lost"
    ENDED = "ended"


TABLE: Final = """\
state    cause         run survives  otherwise
waiting  left          lost          lost
waiting  failed        lost          lost
waiting  disconnected  lost          lost
waiting  silent        waiting       waiting
new      left          left          left
new      failed        lost          ended
new      disconnected  lost          ended
new      silent        lost          new
member   left          left          left
member   failed        ended         ended
member   disconnected  lost          ended
member   silent        lost          member
left     failed        ended         ended
left     disconnected  left          left
left     silent        left          left"""
"""Next state of a rank by its state and the cause, if the run survives the loss or not.
A lost rank is no longer in the run; `ENDED` ends the run.
"""
TRANSITIONS: Final = {
    (RankState(state), cause): (RankState(survived), RankState(fatal))
    for state, cause, survived, fatal in map(str.split, TABLE.splitlines()[1:])
}


class Membership:
    """Ranks of successive runs: when all have left, the same ranks may begin again.

    Args:
        world_size: number of ranks that a run begins with.
        grows: whether newcomers may join the run where an epoch is cut.

    Attributes:
        ranks: ranks in the run now, including those that have left it cleanly.
        left: ranks that have left cleanly, with the last event of each.
        min_ranks: least number of ranks; a cut epoch pauses while there are fewer.
        generation: number of the group; each membership change begins the next
            generation.
        newcomers: ranks that wait to join.
        ready: newcomers that can join when the epoch is cut.
        fresh: members that have joined but do not train yet.
        pending: members that have not formed the group yet.
        reduced: last window whose result each member reports to hold.
    """

    def __init__(self, world_size: int, *, grows: bool) -> None:
        self._world_size = world_size
        self._grows = grows
        self.ranks = set(range(world_size))
        self.left: dict[int, Left] = {}
        self.min_ranks = 1
        self.newcomers: list[Join] = []
        self.ready: set[int] = set()
        self.fresh: set[int] = set()
        self.pending: set[int] = set()
        self.reduced: dict[int, int] = {}
        self._lost: Runs = ()
        self.generation = -1
        self._first_generation = 0
        self._survives = False
        self._joins: dict[int, Join] = {}
        self.early: list[Join] = []

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
        """True if some ranks have joined and are waiting for the others."""
        return 0 < len(self._joins) < self._world_size

    @property
    def has_changed(self) -> bool:
        """True if the ranks are not those that the run began with."""
        return self.generation > self._first_generation

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return sorted(self.ranks - set(self._joins))

    def accepts(self, event: Event) -> bool:
        """True if events of this rank are accepted; newcomers send only some kinds."""
        if isinstance(event, _OF_NO_RANK) or event.rank in self.ranks:
            return True
        if isinstance(event, (Failed, JoinReady, Left, RankLost)):
            return any(join.rank == event.rank for join in self.newcomers)
        return isinstance(event, Join) and self._grows and event.rank >= 0

    def state_of(self, rank: int) -> RankState:
        """Returns the state of a rank whose events are accepted."""
        if rank in self.left:
            return RankState.LEFT
        if rank in self.fresh:
            return RankState.NEW
        return RankState.MEMBER if rank in self.ranks else RankState.WAITING

    def take(self, join: Join) -> str:
        """Records a rank that joins at the start; returns a mismatch, or "".

        Raises:
            ProtocolError: the rank has joined already.
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
        """Returns the join messages of the run's first ranks, in order."""
        return [self._joins[rank] for rank in range(self._world_size)]

    def begin(self, *, survives: bool) -> list[Welcome]:
        """Begins the first generation, since all ranks have joined and agree.

        Args:
            survives: whether the run continues without ranks that are lost.
        """
        self._survives = survives
        self.generation += 1
        self._first_generation = self.generation
        common = self._common(self.joined())
        return [replace(common, rank=rank) for rank in sorted(self.ranks)]

    def begin_again(self) -> list[Join]:
        """Resets the membership for the next run; returns the early `Join`s to it."""
        self._joins.clear()
        self.left.clear()
        self.ranks = set(range(self._world_size))
        early, self.early = self.early, []
        return early

    def lose(self, rank: int) -> list[Instruction]:
        """Removes a lost rank; the others form a new group without it."""
        self.ranks.discard(rank)
        self.fresh.discard(rank)
        self._change(self.ranks)
        return self._regroup(self.ranks, left=(rank,))

    def lose_replica(self, members: Sequence[int]) -> list[Instruction]:
        """Removes the ranks of a pipeline's replica; the others regroup."""
        self.ranks.difference_update(members)
        self.generation += 1
        return self._regroup(self.ranks, left=tuple(members))

    def leave(self, event: Left) -> list[Instruction]:
        """Records a rank that leaves cleanly; a group being formed excludes it."""
        self.left[event.rank] = event
        stay = self.ranks - self.left.keys()
        if event.rank not in self.pending or not stay:
            return []
        self._change(stay)
        return self._regroup(stay, left=(event.rank,), in_order=True)

    def greet(self, join: Join, why_closed: str) -> list[Instruction]:
        """Answers a newcomer's request to join: queues the rank, or rejects it."""
        if join.version != PROTOCOL_VERSION:
            why_closed = (
                f"it uses protocol version {join.version}, not {PROTOCOL_VERSION}"
            )
        if why_closed:
            problem = f"rank {join.rank} cannot join the running run: {why_closed}"
            return [refusal(join.rank, problem)]
        difference = what_differs([next(iter(self._joins.values())), join])
        if difference:
            return [refusal(join.rank, difference)]
        joins = [*(self._joins[rank] for rank in sorted(self.ranks)), join]
        self.newcomers.append(join)
        return [replace(self._common(joins), rank=join.rank)]

    @property
    def is_short(self) -> bool:
        """True if there are fewer ranks than `min_ranks`."""
        return len(self.ranks) < self.min_ranks

    @property
    def awaits_cut(self) -> bool:
        """True if newcomers are ready, or needed, and the epoch may be cut for them."""
        is_wanted = bool(self.ready) or self.is_short
        return is_wanted and not (self.left or self.pending)

    def admit_ready(self) -> tuple[list[Join], list[Instruction]]:
        """Admits the ready newcomers; returns their `Join`s and the instructions."""
        joins = [join for join in self.newcomers if join.rank in self.ready]
        new, before = tuple(join.rank for join in joins), sorted(self.ranks)
        self.fresh |= self.ready
        for rank in new:
            self.withdraw(rank)
        self._joins.update({join.rank: join for join in joins})
        self.ranks.update(new)
        self._change(self.ranks)
        replies = self._regroup(before, joined=new)
        return joins, replies + self._regroup(new, joined=tuple(sorted(self.ranks)))

    def withdraw(self, rank: int) -> None:
        """Removes a rank from the newcomers."""
        self.newcomers = [join for join in self.newcomers if join.rank != rank]
        self.ready.discard(rank)

    def reject_newcomers(self) -> list[Instruction]:
        """Rejects all newcomers, since the run is over."""
        waiting, self.newcomers = [join.rank for join in self.newcomers], []
        self.ready.clear()
        return [
            refusal(rank, f"the run ended before rank {rank} could join it")
            for rank in waiting
        ]

    def arrive(self, event: Regrouped) -> bool:
        """Records that a member is in the new group; returns True after the last one.

        Raises:
            ProtocolError: the rank is no pending member of this group.
        """
        if event.generation < self.generation:
            return False  # the membership has changed again meanwhile
        if event.rank not in self.pending or event.generation > self.generation:
            raise ProtocolError(f"rank {event.rank} is in no such group: {event}")
        self.pending.discard(event.rank)
        is_same = not event.lost or event.reduced in self.reduced.values()
        if self.reduced and not (is_same and event.lost == self._lost):
            raise ProtocolError(
                f"ranks settled a death differently: {self.reduced} without "
                f"{self._lost}, but {event}"
            )
        self.reduced[event.rank], self._lost = event.reduced, event.lost
        return not self.pending

    def _change(self, members: Iterable[int]) -> None:
        """Begins the next generation."""
        self.generation += 1
        self.pending = set(members)
        self.reduced, self._lost = {}, ()

    def _regroup(
        self,
        ranks: Iterable[int],
        *,
        left: tuple[int, ...] = (),
        joined: tuple[int, ...] = (),
        in_order: bool = False,
    ) -> list[Instruction]:
        return [
            Regroup(
                rank=rank,
                generation=self.generation,
                left=left,
                joined=joined,
                in_order=in_order,
            )
            for rank in sorted(ranks)
        ]

    def check(self) -> None:
        """Asserts that all ranks have joined, and that pending ranks are in the run."""
        assert len(self.ranks) <= len(self._joins)
        assert not self.pending - self.ranks

    def _common(self, joins: Sequence[Join]) -> Welcome:
        return Welcome(
            rank=0,
            generation=self.generation,
            devices=tuple(join.device for join in joins),
            memory_bytes=tuple(join.memory_bytes for join in joins),
            survives=self._survives,
        )


def as_members(joins: Sequence[Join]) -> list[Member]:
    """Converts joins to the members that a policy uses."""
    return [Member(join.rank, join.device, join.horizon_batches) for join in joins]


def refusal(rank: int, difference: str) -> Abort:
    """Returns the rejection of a newcomer, with the reason; the run continues."""
    return Abort(rank=rank, reason=difference, kind="mismatch")


def cause_of(event: Left | Failed | RankLost) -> str:
    """Returns the cause of a rank's departure, as named in `TABLE`."""
    if isinstance(event, RankLost):
        return "silent" if event.silent_s else "disconnected"
    return "left" if isinstance(event, Left) else "failed"


def next_state(state: RankState, cause: str, *, survives: bool) -> RankState:
    """Returns the state after a departure; ``survives``: the run continues.

    Raises:
        TransitionError: `TABLE` has no such transition.
    """
    if (state, cause) not in TRANSITIONS:
        why = f"expected a transition of the table, got {state.value} and {cause}"
        raise TransitionError(f"{why}:\n{TABLE}")
    survived, fatal = TRANSITIONS[state, cause]
    return survived if survives else fatal
