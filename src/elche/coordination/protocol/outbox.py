"""Unacknowledged messages, from which a stream resumes after a reconnect. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar, final

ACK_EVERY: Final = 64
"""Messages between two acknowledgements."""

Kept = TypeVar("Kept")


@final
class Outbox(Generic[Kept]):
    """Messages in order, kept until the other side has acknowledged them.

    Attributes:
        taken: number of messages that the receiver has acknowledged.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._kept: deque[Kept] = deque()

    def __bool__(self) -> bool:
        """True if the receiver may lack any message."""
        return bool(self._kept)

    def add(self, *messages: Kept) -> None:
        """Adds messages that are sent, or about to be."""
        self._kept.extend(messages)

    def acknowledge(self, taken: int) -> None:
        """Drops acknowledged messages; ``taken`` counts from the stream's beginning."""
        while self._kept and self.taken < taken:
            self._kept.popleft()
            self.taken += 1

    def rest(self) -> list[Kept]:
        """Returns the messages that the receiver may lack."""
        return [*self._kept]
