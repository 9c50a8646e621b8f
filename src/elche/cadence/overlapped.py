"""How long overlapped windows are best, by the convergence table. Pure.

Short windows learn more per sample, but each costs its copies, and an average that
comes late in a short window costs samples too. What of that weighs most depends on the
link and on the ranks, so the lengths are compared by what they bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elche.cadence.convergence import sample_efficiency
from elche.cadence.throughput import check_int, check_measure
from elche.errors import ConfigError

FINE = 128
"""Up to this anchor all are compared; beyond it those about a hundredth apart."""


@dataclass(frozen=True, slots=True)
class _Ranks:
    """What of ranks' times per batch the length of windows depends on."""

    count: int
    fast_s: float
    slow_s: float
    batches_per_s: float

    @staticmethod
    def of(batch_s: Sequence[float]) -> _Ranks:
        rate = sum(1.0 / each_s for each_s in batch_s)
        return _Ranks(len(batch_s), min(batch_s), max(batch_s), rate)


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
    return _goodput(_Ranks.of(batch_s), anchor, held_s, late_s)


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
    ranks = _Ranks.of(batch_s)
    best, found, anchor = 0.0, 1, 1
    while anchor <= most:
        # Longer windows learn no more per sample than this one would without a lag.
        if anchor > 1 and _goodput(ranks, anchor, 0.0, 0.0) <= best:
            break
        brings = _goodput(ranks, anchor, held_s, late_s)
        if brings > best:
            best, found = brings, anchor
        anchor += max(1, anchor // FINE)
    return found


def _goodput(ranks: _Ranks, anchor: int, held_s: float, late_s: float) -> float:
    """See :func:`overlapped_goodput`."""
    work_s = anchor * ranks.slow_s
    window_s = max(work_s + held_s, late_s)
    batches = work_s * ranks.batches_per_s
    lag_batches = min(late_s, work_s) / ranks.fast_s
    efficiency = sample_efficiency("async", ranks.count, batches, lag_batches)
    return efficiency * work_s / window_s
