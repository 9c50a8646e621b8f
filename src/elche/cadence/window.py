"""Ends of windows: the batch boundary of each rank, and anchors that align them. Pure.

A blocking window loses on each rank the part of a batch between its last boundary and
the common end. With 12.5 batches of the fast rank to 5 of the slow one, half a batch is
lost in every window; with 15 to 6, none is. El Che's anchor meets the overhead target;
a slightly larger anchor may lose less.
"""

from __future__ import annotations

from collections.abc import Sequence

SLACK = 1.5
"""Largest factor of an aligned anchor over El Che's."""
WORTH = 0.004
"""Least fraction of a window that a larger anchor must save."""
ALIGNED_RANKS = 64
"""Most ranks whose anchor is aligned so that all finish whole batches together."""


def should_close(
    elapsed_s: float, batch_s: float, wall_s: float, batches_done: int
) -> bool:
    """True if a window ends at this batch boundary.

    It ends at the boundary nearest to its planned length: now, if another batch would
    end further from ``wall_s`` than now. If both are equally near, another batch runs.
    Fixed counts lose 5 to 25 % to jitter; this does not.

    Args:
        elapsed_s: time (s) since the window began.
        batch_s: expected time (s) of the next batch.
        wall_s: planned length of the window (s).
        batches_done: number of batches that this rank finished in the window.

    Returns:
        True if the window should end before another batch begins. Never before one
        batch is done, and always once ``wall_s`` has passed.
    """
    if batches_done < 1:
        return False
    if elapsed_s >= wall_s:
        return True
    return elapsed_s + batch_s - wall_s > wall_s - elapsed_s


def aligned_anchor(anchor: int, ms_per_batch: Sequence[float], max_anchor: int) -> int:
    """Returns the anchor of least expected loss, up to `SLACK` times ``anchor``.

    Args:
        anchor: El Che's anchor.
        ms_per_batch: delivered milliseconds per batch of every rank, all positive.
        max_anchor: upper limit.

    Returns:
        ``anchor`` itself unless another anchor saves more than 0.4 % of a window.
    """
    best, least = anchor, lost_share(anchor, ms_per_batch)
    for candidate in range(anchor + 1, min(int(anchor * SLACK), max_anchor) + 1):
        share = lost_share(candidate, ms_per_batch)
        if share < least - WORTH:
            best, least = candidate, share
    return best


def lost_share(anchor: int, ms_per_batch: Sequence[float]) -> float:
    """Returns the fraction of all devices' time spent waiting for a common end, 0 to 1.

    The slowest rank trains ``anchor`` batches. Each other rank trains the whole number
    of batches that takes most nearly as long.
    """
    wall_ms = anchor * max(ms_per_batch)
    spent_ms = [max(1, round(wall_ms / ms)) * ms for ms in ms_per_batch]
    end_ms = max(spent_ms)
    speeds = [1.0 / ms for ms in ms_per_batch]
    used = sum(speed * ms / end_ms for speed, ms in zip(speeds, spent_ms, strict=True))
    return max(0.0, 1.0 - used / sum(speeds))
