"""How long overlapped windows are best, by the convergence table. Pure.

Short windows learn more per sample, but each costs its copies, and an average that
comes late in a short window costs samples too. What of that weighs most depends on the
link and on the ranks, so the lengths are compared by what they bring.
"""

from __future__ import annotations

from collections.abc import Sequence

from elche.cadence.convergence import sample_efficiency
from elche.cadence.throughput import check_int, check_measure
from elche.errors import ConfigError


def overlapped_goodput(
    batch_s: Sequence[float], anchor: int, held_s: float, late_s: float
) -> float:
    """Hardware times sample efficiency of overlapped windows of one length.

    Args:
        batch_s: seconds of a batch of each rank.
        anchor: batches of the slowest rank in a window.
        held_s: what a window costs its ranks beside their batches.
        late_s: from a rank's end of a window until it has the average; one that
            outlasts the next window holds that up.

    Returns:
        Above 0, at most 1.
    """
    work_s = anchor * max(batch_s)
    window_s = max(work_s + held_s, late_s)
    batches = sum(work_s / each_s for each_s in batch_s)
    lag_batches = min(late_s, work_s) / min(batch_s)
    efficiency = sample_efficiency("async", len(batch_s), batches, lag_batches)
    return efficiency * work_s / window_s


def best_anchor(
    batch_s: Sequence[float], held_s: float, late_s: float, most: int
) -> int:
    """The anchor at which overlapped windows bring most; the least among equals.

    Args:
        batch_s: seconds of a batch of each rank.
        held_s: as in :func:`overlapped_goodput`.
        late_s: likewise.
        most: upper limit of the anchor.

    Raises:
        ConfigError: a time is negative or not finite, that of a batch 0, or ``most``
            below 1.
    """
    check_int("most", most, 1)
    check_measure("held_s", held_s)
    check_measure("late_s", late_s)
    if not batch_s or not all(check_measure("batch_s", s) > 0.0 for s in batch_s):
        raise ConfigError(f"batch_s must be positive times, got {list(batch_s)}")
    best, found = 0.0, 1
    for anchor in range(1, most + 1):
        # Longer windows learn no more per sample than this one would without a lag.
        if anchor > 1 and overlapped_goodput(batch_s, anchor, 0.0, 0.0) <= best:
            break
        brings = overlapped_goodput(batch_s, anchor, held_s, late_s)
        if brings > best:
            best, found = brings, anchor
    return found
