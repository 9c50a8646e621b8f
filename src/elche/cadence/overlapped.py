"""Best length of overlapped windows, by the convergence table. Pure.

Short windows learn more per sample, but each costs its copies, and a late average costs
samples in a short window. Which effect dominates depends on the link and the ranks, so
lengths are compared by their predicted goodput.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elche.cadence.convergence import table_efficiency

FINE = 128
"""Largest anchor to which all are compared; beyond, about one in a hundred."""
ROOM = 1.2
"""Least length of an overlapped window, in reductions: in shorter windows, ranks wait
for each other unless they end them together."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Summary of all ranks' times per batch, of constant size.

    Attributes:
        ranks: number of ranks.
        fastest_s: time (s) of a batch on the fastest rank.
        slowest_s: time (s) of a batch on the slowest rank.
        per_s: batches of all ranks per second.
    """

    ranks: int
    fastest_s: float
    slowest_s: float
    per_s: float

    @classmethod
    def of(cls, batch_s: Sequence[float]) -> BatchTimes:
        """Summarises each rank's time (s) per batch, all positive."""
        per_s = sum(1.0 / each_s for each_s in batch_s)
        return cls(len(batch_s), min(batch_s), max(batch_s), per_s)


@dataclass(frozen=True, slots=True)
class OverlappedWindow:
    """Properties of overlapped windows of one length.

    Attributes:
        window_s: time (s) from the end of one window to the end of the next.
        batches: batches of all ranks in a window.
        lag_batches: batches of the fastest rank until it has the average.
        work_share: fraction of ``window_s`` that batches take.
    """

    window_s: float
    batches: float
    lag_batches: float
    work_share: float


def overlapped_window(
    times: BatchTimes, anchor: int, held_s: float, late_s: float
) -> OverlappedWindow:
    """Returns overlapped windows of ``anchor`` batches of the slowest rank.

    Args:
        times: summary of the ranks' times per batch.
        anchor: batches of the slowest rank in a window.
        held_s: cost (s) of a window in addition to its batches.
        late_s: time (s) from a rank's close until it has the average; if it outlasts
            the next window, it delays that window's end.
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
    """Returns hardware times sample efficiency of such windows: above 0, at most 1."""
    window = overlapped_window(times, anchor, held_s, late_s)
    efficiency = table_efficiency(
        "async", times.ranks, window.batches, window.lag_batches
    )
    return efficiency * window.work_share


def best_anchor(
    times: BatchTimes, held_s: float, late_s: float, most: int, *, least: int = 1
) -> int:
    """Returns the anchor of overlapped windows with most goodput, the least if equal.

    Args:
        times: summary of the ranks' times per batch.
        held_s: as in :func:`overlapped_window`.
        late_s: as in :func:`overlapped_window`.
        most: upper limit of the anchor.
        least: lower limit, such as :func:`anchor_for`; at most ``most``.
    """
    found = anchor = min(least, most)
    best = 0.0
    while anchor <= most:
        brings = overlapped_goodput(times, anchor, held_s, late_s)
        if brings > best:
            best, found = brings, anchor
        # Longer windows learn no more per sample than this one without a lag.
        elif overlapped_goodput(times, anchor, 0.0, 0.0) <= best:
            break
        anchor += max(1, anchor // FINE)
    return found


def anchor_for(times: BatchTimes, reduction_s: float) -> int:
    """Returns the least anchor whose windows are long enough for a reduction."""
    return max(1, math.ceil(ROOM * reduction_s / times.slowest_s - ROUNDING))
