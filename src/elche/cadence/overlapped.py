"""Best length of overlapped windows, by the convergence table. Pure.

Short windows learn more per sample, but each costs its copies, and an average that
comes late in a short window costs samples too. What of that weighs most depends on the
link and on the ranks, so the lengths are compared by what they bring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elche.cadence.convergence import table_efficiency

FINE = 128
"""Up to this anchor all are compared; beyond it those about a hundredth apart."""
ROOM = 1.2
"""Overlapped windows are so many times as long as a reduction: in shorter ones ranks
that do not end them together wait for each other."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Summary of the seconds per batch of all ranks, of the same size for any number.

    Attributes:
        ranks: how many there are.
        fastest_s: seconds of a batch of the fastest rank.
        slowest_s: of the slowest.
        per_s: batches of all of them in a second.
    """

    ranks: int
    fastest_s: float
    slowest_s: float
    per_s: float

    @classmethod
    def of(cls, batch_s: Sequence[float]) -> BatchTimes:
        """Summary of the seconds per batch of each rank, all positive."""
        per_s = sum(1.0 / each_s for each_s in batch_s)
        return cls(len(batch_s), min(batch_s), max(batch_s), per_s)


@dataclass(frozen=True, slots=True)
class OverlappedWindow:
    """Properties of overlapped windows of one length.

    Attributes:
        window_s: seconds from the end of one to that of the next.
        batches: of all ranks in a window.
        lag_batches: batches of the fastest rank until it has the average.
        work_share: part of ``window_s`` that batches take.
    """

    window_s: float
    batches: float
    lag_batches: float
    work_share: float


def overlapped_window(
    times: BatchTimes, anchor: int, held_s: float, late_s: float
) -> OverlappedWindow:
    """Overlapped windows of ``anchor`` batches of the slowest rank.

    Args:
        times: of the ranks' batches.
        anchor: batches of the slowest rank in a window.
        held_s: what a window costs its ranks beside their batches.
        late_s: from a rank's end of a window until it has the average; one that
            outlasts the next window holds that up.
    """
    work_s = anchor * times.slowest_s
    window_s = max(work_s + held_s, late_s)
    lag_batches = min(late_s, work_s) / times.fastest_s
    return OverlappedWindow(
        window_s, work_s * times.per_s, lag_batches, work_s / window_s
    )


def overlapped_goodput(
    times: BatchTimes, anchor: int, held_s: float, late_s: float
) -> float:
    """Hardware times sample efficiency of such windows: above 0, at most 1."""
    window = overlapped_window(times, anchor, held_s, late_s)
    efficiency = table_efficiency(
        "async", times.ranks, window.batches, window.lag_batches
    )
    return efficiency * window.work_share


def best_anchor(
    times: BatchTimes, held_s: float, late_s: float, most: int, *, least: int = 1
) -> int:
    """The anchor at which overlapped windows bring most; the least among equals.

    Args:
        times: of the ranks' batches.
        held_s: as in :func:`overlapped_window`.
        late_s: likewise.
        most: upper limit of the anchor.
        least: lower limit, ``most`` if that is less: :func:`anchor_for`, for example.
    """
    found = anchor = min(least, most)
    best = 0.0
    while anchor <= most:
        brings = overlapped_goodput(times, anchor, held_s, late_s)
        if brings > best:
            best, found = brings, anchor
        # Longer windows learn no more per sample than this one would without a lag.
        elif overlapped_goodput(times, anchor, 0.0, 0.0) <= best:
            break
        anchor += max(1, anchor // FINE)
    return found


def anchor_for(times: BatchTimes, reduction_s: float) -> int:
    """The least anchor at which windows are as long as a reduction asks for."""
    return max(1, math.ceil(ROOM * reduction_s / times.slowest_s - ROUNDING))
