"""Finds lasting changes of a rank's speed: a throttled device, and its recovery. Pure.

Speed is samples over a rank's own work, in intervals of at least a second that all
ranks share. A rank's usual speed is the median of its first intervals. It has changed
when the latest intervals are all slower, or all faster, by `FACTOR`; they are the usual
ones from then on. So noise below the root of `FACTOR` (22%) is no change, and a change
is found once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Final, final

FACTOR: Final = 1.5
INTERVAL_S: Final = 1.0
KNOWN: Final = 5
"""Intervals that make the usual speed: shares settle in the first seconds."""
LASTING: Final = 3
"""Intervals for which a change must last."""


@final
class SpeedWatch:
    """Watches the speeds of ranks that share their work.

    A slower rank's share falls and the other ranks' shares rise. A batch has fixed
    costs, so these shares move speeds, too: another way than the rank that has changed,
    and by less. So only changes that go the way of the largest one count.
    """

    def __init__(self) -> None:
        self._duration_s = 0.0
        self._work: dict[int, tuple[int, float]] = {}
        self._usual: dict[int, float] = {}
        self._recent: dict[int, list[float]] = {}

    def observe(
        self, duration_s: float, work: Mapping[int, tuple[int, float]]
    ) -> dict[int, tuple[float, float]]:
        """Returns the ranks whose speed has changed, with it before and now.

        Args:
            duration_s: wall time of a window.
            work: samples of each rank in it, and the time of its own work (s).
        """
        self._duration_s += duration_s
        for rank, (samples, busy_s) in work.items():
            before = self._work.get(rank, (0, 0.0))
            self._work[rank] = before[0] + samples, before[1] + busy_s
        if self._duration_s < INTERVAL_S:
            return {}
        for rank, (samples, busy_s) in self._work.items():
            if samples > 0 and busy_s > 0:
                speeds = [*self._recent.get(rank, ()), samples / busy_s]
                self._recent[rank] = speeds[-KNOWN:]
                if len(speeds) == KNOWN:
                    self._usual.setdefault(rank, median(speeds))
        self._duration_s, self._work = 0.0, {}
        return self._changes()

    def _changes(self) -> dict[int, tuple[float, float]]:
        now = {rank: median(self._recent[rank][-LASTING:]) for rank in self._usual}
        ratios = {rank: math.log(now[rank] / self._usual[rank]) for rank in now}
        lasting = [rank for rank in ratios if self._lasts(rank)]
        if not lasting:
            return {}
        most = max((ratios[rank] for rank in lasting), key=abs)
        found = {
            rank: (self._usual[rank], now[rank])
            for rank in lasting
            if ratios[rank] * most > 0
        }
        moved = [rank for rank in ratios if rank in found or ratios[rank] * most < 0]
        self._usual |= {rank: now[rank] for rank in moved}
        return found

    def _lasts(self, rank: int) -> bool:
        usual, latest = self._usual[rank], self._recent[rank][-LASTING:]
        return max(latest) * FACTOR < usual or min(latest) > usual * FACTOR
