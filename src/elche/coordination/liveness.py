"""Heartbeats of ranks: who is silent for too long, and where it was last. Pure."""

from __future__ import annotations

from typing import final

BEAT_S = 1.0
"""A rank's own thread sends a beat so often, whatever its training thread does."""
SILENT_S = 10.0
"""A rank that does not beat for so long is stopped, and dead where a run goes on."""
QUIET_S = 8.0
"""A training thread that has not come to elche for so long says where it is."""


@final
class Liveness:
    """Silence counted in the coordinator's own ticks.

    So time in which the coordinator itself was stopped (Ctrl-Z, a suspended machine)
    is nobody's silence. A rank that has never beaten is not watched.
    """

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._ticks: dict[int, int] = {}
        self._stacks: dict[int, str] = {}
        self._waits: dict[int, bool] = {}

    def beat(self, rank: int, stack: str, *, waits: bool) -> None:
        """A rank lives.

        Args:
            rank: which.
            stack: where its training thread is, if it has long been elsewhere than in
                elche; else "".
            waits: it has long been waiting for other ranks.
        """
        self._ticks[rank] = 0
        self._stacks[rank], self._waits[rank] = stack, waits

    def late(self) -> str:
        """Places of ranks that others have long been waiting for, in words, or ""."""
        if not any(self._waits.values()):
            return ""
        stacks = sorted(self._stacks.items())
        return "; ".join(f"rank {rank} is at {at}" for rank, at in stacks if at)

    def runs(self, rank: int) -> None:
        """The process of a silent rank is not stopped: none of its threads can beat."""
        self._ticks[rank] = 0
        self._stacks[rank] = "a call into C code that holds the GIL"

    def forget(self, rank: int) -> None:
        """A rank is gone, or has left."""
        for each in (self._ticks, self._stacks, self._waits):
            each.pop(rank, None)

    def tick(self) -> list[int]:
        """Time has passed; ranks that are silent for too long now."""
        for rank in self._ticks:
            self._ticks[rank] += 1
        limit = round(SILENT_S / self._tick_s)
        return [rank for rank, ticks in self._ticks.items() if ticks == limit]
