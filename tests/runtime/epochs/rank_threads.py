"""Ranks as threads around the pure coordinator: real runs, without a process or socket.

Everything of a rank is real but two seams: the control channel hands events to the
`Coordinator` itself, and process groups sum tensors of this process.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed as dist

from elche.comm.transport.process_group import Group
from elche.coordination.protocol.events import (
    Event,
    ModelUpdated,
    RankLost,
    WindowClosed,
)
from elche.coordination.protocol.instructions import Abort, Instruction, Reduce, Regroup
from elche.coordination.state import Coordinator
from elche.errors import CommunicationError
from tests.runtime.epochs.turns import Turns

ENDING = (Abort, Regroup)
CLOSED, REDUCED, STEPPED, TRAINED = "closed", "reduced", "stepped", "trained"

Entry = tuple[str, int, tuple[int, ...]]
"""(STEPPED or TRAINED, epoch, positions), before the backward pass of a step or of a
window's batch; or (CLOSED or REDUCED, window, ())."""
Saved = tuple[tuple[dict[str, Any], ...], int]
"""States of the run, its epochs, the model and the optimizer; entries until then."""


class Killed(BaseException):
    """This rank's process dies here."""


@dataclass(slots=True)
class Collective:
    """A sum that some ranks of a group have begun: parts by place, and who has it."""

    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None
    taken: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Meeting:
    """Ranks that form a group, by place, its collectives, and ranks that have left."""

    ranks: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    collectives: list[Collective] = field(default_factory=list)


class Hub:
    """The coordinator, the ranks' inboxes and their groups.

    Args:
        ranks: of the run.
        reduce_s: virtual seconds of a collective, for whoever waits for it.
        tears: with a rank dies the sum of each collective that it was in, on all that
            have not taken it yet, as gloo may have it; so some have it and others not.

    Attributes:
        turns: who runs.
        entries: per rank, what it has trained, closed and reduced, in order.
        plans: of each window, by attempt and rank.
        dead: ranks that were killed.
        half_held: sums that a survivor lacks and another one has.
        progress: samples of the run, as each rank has them at its end.
        saved: by rank, what its first checkpoint has.
        resumed: what each rank begins with, if it resumes.
        deadly: collectives that a rank still begins before the one in which it dies.
    """

    def __init__(
        self, ranks: int, reduce_s: float = 0.0, *, tears: bool = False
    ) -> None:
        self.reduce_s, self.tears = reduce_s, tears
        self.turns = Turns(ranks)
        self.core = Coordinator(ranks, survives=True)
        self.inboxes: list[deque[Instruction]] = [deque() for _ in range(ranks)]
        self.entries: list[list[Entry]] = [[] for _ in range(ranks)]
        self.plans: dict[int, dict[int, dict[int, Reduce]]] = defaultdict(dict)
        self.dead: set[int] = set()
        self.deadly: dict[int, int] = {}
        self.half_held = 0
        self.progress: dict[int, float] = {}
        self.saved: dict[int, Saved] = {}
        self.resumed: dict[int, Saved] = {}
        self._first_window = 0
        self._meetings: dict[int | str, Meeting] = defaultdict(Meeting)

    def follow(self, before: Hub) -> None:
        """These ranks resume what all ranks of another hub have saved."""
        self.resumed = before.saved
        kept = [before.saved[rank][1] for rank in range(len(before.entries))]
        self.entries = [of[:n] for of, n in zip(before.entries, kept, strict=True)]
        numbers = (n for of in self.entries for kind, n, _ in of if kind == CLOSED)
        self._first_window = 1 + max(numbers, default=-1)
        for window in range(self._first_window):
            self.plans[window] = before.plans[window]

    def take(self, event: Event) -> None:
        """An event comes to the coordinator; what it answers is there at once."""
        if isinstance(event, WindowClosed | ModelUpdated):
            kind = CLOSED if isinstance(event, WindowClosed) else REDUCED
            window = self._first_window + event.window
            self.entries[event.rank].append((kind, window, ()))
        now_s = max(self.turns.clocks)
        told = self.core.handle(event, now_s)
        self.core.check()
        for each in told:
            self.inboxes[each.rank].append(each)
            if isinstance(each, Reduce):
                window = self._first_window + each.window
                attempts = self.plans[window].setdefault(each.attempt, {})
                attempts[each.rank] = each

    def kill(self, rank: int) -> NoReturn:
        """This rank's process dies."""
        self.dead.add(rank)
        self.take(RankLost(rank=rank))
        raise Killed

    def begins_collective(self, rank: int) -> None:
        """Kills the rank if this is the one."""
        if rank in self.deadly and rank not in self.dead:
            self.deadly[rank] -= 1
            if self.deadly[rank] < 0:
                self.kill(rank)

    def form(self, groups: Any, ranks: Sequence[int], name: int | str) -> Group:
        """As `RankGroups._form_watched`."""
        channel, world_size = groups._channel, len(ranks)
        rank, meeting = channel.rank, self._meetings[name]
        place = ranks.index(rank)
        if isinstance(name, int):  # of the next generation: all before are left
            for other in self._meetings.values():
                other.left |= {rank} if other is not meeting else set()
        meeting.ranks[place] = rank

        def is_formed() -> bool:
            return len(meeting.ranks) == world_size

        def is_over() -> bool:
            return is_formed() or channel.has_ending

        while not is_formed():
            self.turns.wait(rank, is_over, f"group {name} of {world_size}")
            groups._check()
        members = Members(self, meeting, place)
        return Group(members, place, world_size, groups._timeout_s)


class ThreadChannel:
    """One rank's end of the control channel, as `ControlChannel`.

    Args:
        hub: the other end.
        rank: this rank.
    """

    beside = None
    is_unreachable = False

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self._inbox = hub.inboxes[rank]

    @property
    def has_ending(self) -> bool:
        """Whether the run is ended, or its membership changed, by what has come."""
        return any(isinstance(each, ENDING) for each in self._inbox)

    def send(self, *events: Event) -> None:
        for event in events:
            if self.rank in self.hub.dead:
                raise CommunicationError(f"rank {self.rank} is dead")
            self.hub.take(event)

    def ready(self) -> Iterator[Instruction]:
        while self._inbox:
            yield self._inbox.popleft()

    def receive(self, timeout_s: float, waiting_for: str) -> Instruction:
        self.wait_readable(math.inf, waiting_for)
        return self._inbox.popleft()

    def wait_readable(self, timeout_s: float, why: str = "any instruction") -> None:
        if self.rank in self.hub.dead:
            raise CommunicationError(f"rank {self.rank} is dead")
        self.hub.turns.wait(self.rank, lambda: bool(self._inbox), why, timeout_s)

    def await_kinds(self, kinds: tuple[type[Any], ...], timeout_s: float) -> bool:
        def ready() -> bool:
            return any(isinstance(each, kinds) for each in self._inbox)

        return self.hub.turns.wait(self.rank, ready, f"one of {kinds}", timeout_s)

    def find_abort(self) -> Abort | None:
        return next(iter(self.waiting(Abort)), None)

    def waiting(self, kind: type[Any]) -> list[Any]:
        return [each for each in self._inbox if isinstance(each, kind)]

    def take(self, kind: type[Any]) -> list[Any]:
        found = self.waiting(kind)
        for each in found:
            self._inbox.remove(each)
        return found

    def beat(self, stack: str, *, waits: bool) -> None:
        """No silence is a death here."""

    def store_set(self, key: str, value: bytes) -> None:
        """Nobody asks for it."""

    def store_published(self, keys: Sequence[str], timeout_s: float) -> set[str]:
        return set()

    def close(self) -> None:
        """There is no socket."""


class Members:
    """One rank's end of a group, as torch's process group that `Group` calls."""

    def __init__(self, hub: Hub, meeting: Meeting, place: int) -> None:
        self.hub = hub
        self.meeting = meeting
        self.place = place
        self.rank = meeting.ranks[place]
        self._begun = 0

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Work:
        return self._begin(tensors[0], tensors[0].detach().clone())

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        is_mine = self.place == source
        mine = tensor.detach().clone() if is_mine else torch.zeros_like(tensor)
        return self._begin(tensor, mine)

    def shutdown(self) -> None:
        """Nothing was opened."""

    def _begin(self, tensor: torch.Tensor, mine: torch.Tensor) -> Work:
        self.hub.begins_collective(self.rank)
        collectives, ranks = self.meeting.collectives, self.meeting.ranks
        if self._begun == len(collectives):
            collectives.append(Collective())
        collective = collectives[self._begun]
        self._begun += 1
        collective.parts[self.place] = mine
        if len(collective.parts) == len(ranks):
            parts = [collective.parts[place] for place in range(len(ranks))]
            assert len({(part.shape, part.dtype) for part in parts}) == 1
            collective.total = sum(parts[1:], start=parts[0].clone())
        return Work(self, collective, tensor)


class Work(dist._Work):
    """One rank's part in a collective; the sum comes into the tensor that it gave."""

    def __init__(
        self, members: Members, collective: Collective, tensor: torch.Tensor
    ) -> None:
        super().__init__()
        self._members = members
        self._collective = collective
        self._tensor = tensor

    def is_completed(self) -> bool:
        """Whether it has its sum, or never will: a rank has gone before its part."""
        meeting, dead = self._members.meeting, self._members.hub.dead
        gone = {p for p, r in meeting.ranks.items() if r in dead or r in meeting.left}
        is_over = self._collective.total is not None or self._is_torn
        return is_over or not gone <= self._collective.parts.keys()

    @property
    def _is_torn(self) -> bool:
        hub, ranks = self._members.hub, self._members.meeting.ranks
        is_hit = hub.tears and not hub.dead.isdisjoint(ranks.values())
        return is_hit and self._members.place not in self._collective.taken

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        members = self._members
        is_long = timeout.days > 1
        most_s = math.inf if is_long else timeout.total_seconds()
        turns, why = members.hub.turns, "a collective"
        turns.wait(members.rank, self.is_completed, why, most_s)
        taken, place = self._collective.taken, members.place
        if self._collective.total is None or self._is_torn:
            members.hub.half_held += bool(taken)
            raise RuntimeError("a rank has not come")
        if place not in taken:
            taken.add(place)
            turns.clocks[members.rank] += members.hub.reduce_s
        with torch.no_grad():
            self._tensor.copy_(self._collective.total)
        return True
