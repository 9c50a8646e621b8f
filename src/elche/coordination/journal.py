"""The coordinator's state as a function of its journal. Pure.

Every change of the core is an `Entry`: source, input and time. A `RunRecord` that
replays another's entries in order reaches the same state and sends each rank the same
instructions. Ranks and coordinator count the messages received from each other, and
keep those they sent until acknowledged. So a restarted coordinator resumes each rank's
stream where it stopped.

The launcher keeps the journal (write-ahead): an entry is written before its
instructions are sent. So no rank is ahead of the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from elche.coordination.protocol.events import Input, StoreSet, StreamBegun
from elche.coordination.protocol.instructions import Abort, Instruction
from elche.coordination.protocol.outbox import Outbox
from elche.coordination.state import Coordinator

LAUNCHER: Final = -1
"""The launcher as an entry's source."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One input of the coordinator.

    Attributes:
        source: rank whose stream delivered it, or `LAUNCHER`; inputs of both are
            counted. None for events of the coordinator's own shell.
        what: an event, or other input to record.
        now_s: time of receipt.
    """

    source: int | None
    what: Input
    now_s: float


@dataclass(slots=True)
class RankStream:
    """One rank's messages in both directions.

    Attributes:
        name: stream name, by which a rank is recognised when it reconnects.
        taken: number of messages received from the rank.
        acknowledged: number of these messages acknowledged to the rank.
        pending: instructions that the rank may not have received.
    """

    name: str
    taken: int = 0
    acknowledged: int = 0
    pending: Outbox[Instruction] = field(default_factory=Outbox)


@final
class RunRecord:
    """State that a coordinator must keep over a restart.

    Args:
        world_size: number of ranks in the run.
        survives: as for `Coordinator`.

    Attributes:
        core: the coordination core.
        streams: streams of ranks that can reconnect, by rank.
        store: rendezvous values.
        commands: number of inputs received from the launcher.
        end: cause of an early end of the run, if any.
        now_s: time of the last entry.
    """

    def __init__(self, world_size: int, *, survives: bool) -> None:
        self.core = Coordinator(world_size, survives=survives)
        self.streams: dict[int, RankStream] = {}
        self.store: dict[str, bytes] = {}
        self._world_size, self._grows = world_size, survives
        self.commands = 0
        self.end: Abort | None = None
        self.now_s = 0.0

    def apply(self, entry: Entry) -> list[Instruction]:
        """Applies an entry; returns the instructions to send."""
        what, source, self.now_s = entry.what, entry.source, entry.now_s
        if source == LAUNCHER:
            self.commands += 1
        elif source is not None and source in self.streams:
            self.streams[source].taken += 1
        if isinstance(what, StreamBegun):
            self.streams[what.rank] = RankStream(what.name)
            return self._kept([replace(self.end, rank=what.rank)] if self.end else [])
        if isinstance(what, StoreSet):
            self.store[what.key] = what.value
            return []
        return self._kept(self.core.handle(what, entry.now_s))

    def clock_s(self, wall_s: float, host_s: float) -> float:
        """Returns the run clock's offset (s) to a host's; it includes restarts."""
        return max(self.now_s, wall_s) - host_s

    def expects(self, rank: int) -> bool:
        """Returns True if this rank may connect, or join a run that grows."""
        return rank >= 0 and (rank < self._world_size or self._grows)

    def replay(self, entries: Sequence[Entry]) -> None:
        """Replays the entries of another record."""
        for entry in entries:
            self.apply(entry)

    def _kept(self, pending: list[Instruction]) -> list[Instruction]:
        for one in pending:
            if isinstance(one, Abort) and self.core.aborted is not None:
                self.end = one
            if one.rank in self.streams:
                self.streams[one.rank].pending.add(one)
        return pending
