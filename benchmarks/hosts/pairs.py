"""Ratios of paired runs, without the pairs that the machine disturbed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elche.demo.verdict import MIN_CONTROL
from elche.monitor.table import paired_interval

MOST_DISTURBED = 0.03
"""A control may be so far below the best one, or below `MIN_CONTROL` of what devices
declare if that is more: a machine may be busy all the time."""


@dataclass(frozen=True)
class Ratio:
    """Several hosts over one.

    Attributes:
        pairs: how many count.
        mean: geometric.
        low: end of its 95 % interval; None of a single pair.
        high: the other end.
    """

    pairs: int
    mean: float
    low: float | None
    high: float | None


def undisturbed(controls: Sequence[float], declared: float) -> list[int]:
    """Pairs that count, by number.

    Args:
        controls: rates of the devices without communication: one before each pair, and
            one after the last.
        declared: rate of the devices.
    """
    least = (1.0 - MOST_DISTURBED) * max(*controls, MIN_CONTROL * declared)
    pairs = range(len(controls) - 1)
    return [pair for pair in pairs if min(controls[pair : pair + 2]) >= least]


def ratio_of(several: Sequence[float], one: Sequence[float]) -> Ratio | None:
    """The ratio of rates over pairs; None without any."""
    if not several:
        return None
    ours, theirs = list(map(math.log, several)), list(map(math.log, one))
    if len(ours) == 1:
        return Ratio(1, math.exp(ours[0] - theirs[0]), None, None)
    found = paired_interval(ours, theirs)
    return Ratio(len(ours), *map(math.exp, (found.mean, found.low, found.high)))
