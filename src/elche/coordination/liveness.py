"""Heartbeats: detects silent ranks, and keeps their last position. Pure."""

from __future__ import annotations

from typing import final

BEAT_S = 1.0
"""Interval (s) of heartbeats, sent by a separate thread."""
SILENT_S = 10.0
"""Time (s) without a heartbeat after which a rank is killed and counts as dead."""
QUIET_S = 8.0
"""Time (s) outside elche after which a training thread's position is reported."""


@final
class Liveness:
    """Silence of ranks, counted in the coordinator's own ticks.

    A pause of the coordinator itself (Ctrl-Z, a suspended machine) therefore counts as
    silence of no rank. A rank is watched from its first heartbeat.
    """

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._ticks: dict[int, int] = {}
        self._stacks: dict[int, str] = {}
        self._waits: dict[int, bool] = {}

    def beat(self, rank: int, stack: str, *, waits: bool) -> None:
        """Records a heartbeat.

        Args:
            rank: the sender.
            stack: position of its training thread if that has long been outside elche;
                else "".
            waits: whether the rank has long been waiting for other ranks.
        """
        self._ticks[rank] = 0
        self._stacks[rank], self._waits[rank] = stack, waits

    def late(self) -> str:
        """Formats positions of ranks that others have long been waiting for, or ""."""
        if not any(self._waits.values()):
            return ""
        stacks = sorted(self._stacks.items())
        return "; ".join(f"rank {rank} is at {at}" for rank, at in stacks if at)

    def runs(self, rank: int) -> None:
        """Resets a silent rank whose process runs: only the GIL delays it."""
        self._ticks[rank] = 0
        self._stacks[rank] = "a call into C code that holds the GIL"

    def forget(self, rank: int) -> None:
        """Stops watching a rank that is lost or has left."""
        for each in (self._ticks, self._stacks, self._waits):
            each.pop(rank, None)

    def tick(self) -> list[int]:
        """Counts a tick; returns ranks that have just been silent for too long."""
        for rank in self._ticks:
            self._ticks[rank] += 1
        limit = round(SILENT_S / self._tick_s)
        return [rank for rank, ticks in self._ticks.items() if ticks == limit]
