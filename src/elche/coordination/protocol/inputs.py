"""Inputs of a coordinator: events, and what else is to be remembered. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elche.coordination.protocol.events import Event


@dataclass(frozen=True, slots=True)
class StreamBegun:
    """A rank has come, with a stream of messages of that name."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class StoreSet:
    """A rank has published a rendezvous value."""

    key: str
    value: bytes


Input: TypeAlias = Event | StreamBegun | StoreSet
