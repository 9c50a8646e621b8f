"""Finds lasting changes of ranks' speeds, as of a throttled device. Pure."""

from __future__ import annotations

import math
from collections.abc import Set
from statistics import median
from typing import Any, Final, final

FACTOR: Final = 1.5
INTERVAL_S: Final = 1.0
KNOWN: Final = 5
"""Intervals whose median is the usual speed; shares settle in these first seconds."""
LASTING: Final = 3
"""Intervals that a change must last."""


@final
class SpeedWatch:
    """Watches ranks that share the work of a run under one policy.

    Speed is samples over time of own work, in intervals of a second. It has changed
    when the latest intervals all differ from the usual one by `FACTOR`; that is the
    usual speed from then on. So noise below the root of `FACTOR` (22%) is no change.

    Shares follow a rank that changes. As batches have fixed costs, the other ranks'
    speeds follow, too: by less, and the other way. Such changes are not returned.
    """

    def __init__(self) -> None:
        self._duration_s, self._work = 0.0, dict[int, tuple[int, float]]()
        self._recent, self._usual = dict[int, list[float]](), dict[int, float]()

    def observe(
        self, window: dict[str, Any], ranks: Set[int]
    ) -> list[tuple[str, str, int]]:
        """Returns name, text and rank of changes in a further ``window`` record."""
        names = "rank_samples", "discarded_samples", "busy_s"
        for rank, row in enumerate(zip(*map(window.get, names), strict=True)):
            samples, time_s = self._work.get(rank, (0, 0.0))
            self._work[rank] = samples + row[0] + row[1], time_s + row[2]
        self._duration_s += window["duration_s"]
        if self._duration_s < INTERVAL_S:
            return []
        for rank, (samples, time_s) in self._work.items():
            if rank in ranks and samples > 0 and time_s > 0:
                recent = [*self._recent.get(rank, ()), samples / time_s][-KNOWN:]
                self._recent[rank] = recent
                if len(recent) == KNOWN:
                    self._usual.setdefault(rank, median(recent))
        self._duration_s, self._work = 0.0, {}
        return self._changes()

    def _changes(self) -> list[tuple[str, str, int]]:
        lasting, moves, found = set[int](), dict[int, float](), []
        for rank, usual in self._usual.items():
            latest = self._recent[rank][-LASTING:]
            moves[rank] = math.log(median(latest) / usual)
            if max(latest) * FACTOR < usual or min(latest) > usual * FACTOR:
                lasting.add(rank)
        most = max((moves[rank] for rank in lasting), key=abs, default=0.0)
        for rank, move in moves.items():
            before, now = self._usual[rank], median(self._recent[rank][-LASTING:])
            if rank in lasting and move * most > 0:
                text = f"{math.exp(abs(move)):.1f} times: {now:,.1f} samples/s of its "
                text += f"own work, {before:,.1f} before"
                found.append(("slower" if move < 0 else "faster", text, rank))
            if rank in lasting or move * most < 0:
                self._usual[rank] = now
        return found
