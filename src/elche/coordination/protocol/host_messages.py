"""Messages between the launchers of a run's hosts; the first host's leads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OPEN: Final = 0
"""Number of hosts of a run that begins with one and that others join at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoins:
    """A launcher presents itself, the ranks that it starts, and what it runs.

    ``nnodes`` is `OPEN` where it is to join a run under way; ``address`` is where
    others reach its ranks; ``versions`` are (name, version) of what must be equal
    everywhere; ``ports`` are where it would be met as a successor: by launchers, and by
    ranks.
    """

    node_rank: int
    nnodes: int
    ranks: int
    name: str
    address: str
    versions: tuple[tuple[str, str], ...]
    ports: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"host {self.node_rank} ({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """A rank's process has ended, by this code; negative for a signal."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInterrupted:
    """A launcher was sent a signal."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWelcome:
    """A launcher starts its ranks now, ``first`` and following.

    ``environment`` are variables that the first host's launcher gives to every rank.
    ``run`` names the run where another host may succeed that one, else it is "".
    """

    first: int
    world_size: int
    environment: tuple[tuple[str, str], ...]
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRefused:
    """The hosts do not fit together."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBeat:
    """The first host's launcher lives, and the link to it.

    ``is_needed``: the run would end without this host; else it goes on when the host
    has been silent for too long.
    """

    is_needed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRank:
    """A rank's process is to be sent a signal."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run is over, or this host has left it: exit code, and the reason if any."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsChanged:
    """The hosts of the run now: a view, see `elche.coordination.succession`.

    ``chain`` are the hosts of each view since the last settled one, of this one last;
    ``successor`` is -1 where no host is. ``places`` say of each: its number, name and
    address, the ports of its launcher and of its coordinator as a successor, and the
    first of its ranks and their number. ``witness`` is "" without one.
    """

    number: int
    successor: int
    chain: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, str, str, int, int, int, int], ...]
    witness: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPiece:
    """Entries of the coordinator's journal: the piece of that number.

    ``commands`` inputs of the leading launcher were taken by then.
    """

    number: int
    commands: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTook:
    """A host lives, and has this view, and the journal up to this piece.

    ``can_lead``: its coordinator stands by, should it come to lead.
    """

    view: int
    pieces: int
    can_lead: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HostComes:
    """A launcher comes to the successor of the host that led."""

    run: str
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKept:
    """The successor leads now: ranks go on with the coordinator at this port of it."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteAsked:
    """A host asks a witness for its vote: see `elche.coordination.succession`."""

    run: str
    node_rank: int
    view: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteGiven:
    """The witness's answer."""

    is_given: bool


FromHost = HostJoins | RankEnded | HostInterrupted | HostTook | HostComes | VoteAsked
"""What other hosts' launchers send to the first one's, and to a witness."""
FromLeader = (
    HostWelcome
    | HostRefused
    | HostBeat
    | SignalRank
    | RunEnded
    | HostsChanged
    | JournalPiece
    | HostKept
    | VoteGiven
)
"""What those send to them."""
