"""Contenders of capped time whose ranks' clocks do not say the same."""

from __future__ import annotations

from typing import Any

import elche
from benchmarks.hetero.contender import BenchContender, BenchSpec
from tests.harness.rank_main import this_place

TICK_S = 0.01


class TickingClock:
    """Every look at it takes ``tick_s``; nothing else moves it."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self._tick_s
        return self._now_s


def train_capped(spec: BenchSpec) -> dict[str, Any]:
    """Trains a contender; the clock of the last rank is three times as fast."""
    place = this_place()
    is_last = place.rank == place.world_size - 1
    try:
        return BenchContender(spec, TickingClock(TICK_S * (3 if is_last else 1))).run()
    finally:
        elche.shutdown()
