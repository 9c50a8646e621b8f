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
    everywhere.
    """

    node_rank: int
    nnodes: int
    ranks: int
    name: str
    address: str
    versions: tuple[tuple[str, str], ...]

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
    """

    first: int
    world_size: int
    environment: tuple[tuple[str, str], ...]


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


FromHost = HostJoins | RankEnded | HostInterrupted
"""What other hosts' launchers send to the first one's."""
FromLeader = HostWelcome | HostRefused | HostBeat | SignalRank | RunEnded
"""What that one sends to them."""
