"""Splits a batch among ranks of unlike speed and memory, for a short step.

`best_step_s` is a lower bound for synchronous data parallelism. A sample is not
divided, and each rank with samples pays its time per batch (fixed cost of a pass,
optimizer) in addition to its samples' time. The longest rank's time is the step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from elche.errors import ConfigError

WORTH_NAMING = 0.05
"""Least fraction of a step lost to whole samples that is reported."""
SMALL = 0.02
"""Fraction lost below which a batch is large enough."""
MOST_DOUBLINGS = 10
"""Most doublings of a batch that are advised."""


def split_for_makespan(
    total: int,
    cost: Sequence[float],
    fixed_samples: Sequence[float],
    minimum: int,
    caps: Sequence[int | None] | None = None,
    *,
    accumulates: bool = False,
) -> tuple[int, ...]:
    """Returns integer shares for the shortest step.

    A rank ends its share ``n`` after ``cost * (fixed_samples + n)``. Assigning each
    sample to the rank that would finish it first is optimal, as each rank's time only
    grows. A state on that path is found by bisection of the time, so that only the last
    samples, fewer than W, are assigned one by one. The first guess, for samples that
    could be divided, is usually such a state.

    Args:
        total: samples to distribute, at least ``minimum`` for every rank.
        cost: time per sample of each rank, positive.
        fixed_samples: fixed cost of each rank in samples, not negative.
        minimum: least share of a rank.
        caps: largest share of each rank, at least ``minimum``; None for any size.
        accumulates: a cap limits no share, but each micro-batch of up to ``caps[r]``
            samples costs the rank its fixed time again.

    Returns:
        One share per rank, with sum ``total``; of equal choices the lowest ranks.

    Raises:
        ConfigError: the sum of the caps is below ``total``.
    """
    ranks = range(len(cost))
    known = caps or [None for _ in ranks]
    passing = [cap if accumulates else None for cap in known]
    room = [total if accumulates or cap is None else cap for cap in known]
    if sum(room) < total:
        raise ConfigError(
            f"expected caps that sum to {total}, got a sum of {sum(room)}: {room}"
        )

    def end(rank: int, part: int) -> float:
        if part > room[rank]:
            return math.inf
        passes = passes_of(part, passing[rank])
        return cost[rank] * (fixed_samples[rank] * passes + part)

    def done_by(rank: int, level: float) -> int:
        fixed, cap = fixed_samples[rank], passing[rank] or total
        passes, rest = divmod(level / cost[rank], fixed + cap)
        part = int(passes) * cap + max(0, math.floor(rest - fixed))
        return min(max(minimum, part), room[rank])

    low, high = 0.0, max(map(end, ranks, room))
    level = (total + sum(fixed_samples)) / sum(1.0 / each for each in cost)
    parts = [minimum for _ in ranks]
    while total - sum(parts) >= len(parts) and low < level < high:
        tried = [done_by(rank, level) for rank in ranks]
        if sum(tried) <= total:
            low, parts = level, tried
        else:
            high = level
        level = (low + high) / 2
    ends = [(end(rank, part + 1), rank) for rank, part in enumerate(parts)]
    heapq.heapify(ends)
    for _ in range(total - sum(parts)):
        rank = ends[0][1]
        parts[rank] += 1
        heapq.heapreplace(ends, (end(rank, parts[rank] + 1), rank))
    return tuple(parts)


def clip_split(
    parts: Sequence[int], total: int, minimum: int
) -> tuple[int, ...] | None:
    """Clips the shares of a larger batch to a smaller one, keeping samples' ranks.

    Only the last samples move to later ranks that would have less than the minimum.

    Args:
        parts: shares of the larger batch, each at least the minimum or 0.
        total: samples of the smaller batch.
        minimum: least share of a rank that has one.

    Returns:
        One share per rank, with sum ``total``; None if ``total`` is too small for all.
    """
    owed = minimum * sum(part > 0 for part in parts)
    if total < owed:
        return None
    clipped, border, stop = [], 0, 0
    for part in parts:
        border += part
        owed -= minimum * (part > 0)
        start, stop = stop, min(border, total - owed) if part else stop
        clipped.append(stop - start)
    return tuple(clipped)


def pick_sizes(total: int, sizes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Returns one of its sizes for each rank, with sum ``total``; None if impossible.

    The sums that some ranks can reach are bits of one integer, so a rank's size shifts
    them all at once: O(W * sizes) operations on integers of ``total`` bits.

    Args:
        total: samples to distribute.
        sizes: allowed sizes of each rank, in order of preference.
    """
    reached = [1]
    for known in sizes:
        sums = 0
        for size in known:
            sums |= reached[-1] << size
        reached.append(sums & ((2 << total) - 1))
    if not reached.pop() >> total & 1:
        return None
    parts, left = [], total
    for known, sums in zip(reversed(sizes), reversed(reached), strict=True):
        part = next(n for n in known if n <= left and sums >> (left - n) & 1)
        parts.append(part)
        left -= part
    return tuple(reversed(parts))


def split_from_sizes(
    total: int, sizes: Sequence[Sequence[int]], end: Callable[[int, int], float]
) -> tuple[int, ...] | None:
    """Returns the split from each rank's sizes with the shortest step, or None.

    Args:
        total: samples to distribute.
        sizes: allowed sizes of each rank.
        end: returns the time at which a rank would finish a share.
    """
    ends = [[(end(r, n), n) for n in known] for r, known in enumerate(sizes)]
    levels = sorted({end_s for each in ends for end_s, _ in each})
    low, high, found = 0, len(levels), None
    while low < high:
        middle = (low + high) // 2
        level = levels[middle]
        allowed = [[n for end_s, n in each if end_s <= level] for each in ends]
        split = pick_sizes(total, allowed)
        if split is None:
            low = middle + 1
        else:
            high, found = middle, split
    return found


def passes_of(samples: int, cap: int | None) -> int:
    """Returns the number of micro-batches for ``samples`` samples."""
    return 1 if cap is None else max(1, -(-samples // cap))


def given_step_s(
    parts: Sequence[int], sample_s: Sequence[float], batch_s: Sequence[float]
) -> float:
    """Returns the time (s) of a step with these shares; a share may be empty."""
    costs = zip(parts, sample_s, batch_s, strict=True)
    return max((fixed + part * each for part, each, fixed in costs if part), default=0)


def best_step_s(
    batch: int, sample_s: Sequence[float], batch_s: Sequence[float]
) -> float:
    """Returns the time (s) of the shortest step; slow ranks may get no samples.

    Args:
        batch: samples of the global batch.
        sample_s: time (s) per sample of each rank, positive.
        batch_s: time (s) per batch of each rank with samples, not negative.
    """
    fixed = [once / each for once, each in zip(batch_s, sample_s, strict=True)]
    parts = split_for_makespan(batch, sample_s, fixed, 0)
    return given_step_s(parts, sample_s, batch_s)


def whole_sample_bound(
    batch: int, sample_s: Sequence[float]
) -> tuple[float, int | None] | None:
    """Returns the fraction of speed that whole samples leave, and a sufficient batch.

    Returns:
        The fraction left, and the first doubling of the batch from which less than
        `SMALL` is lost, or None. (A few larger batches are tried as well, since a
        single size may divide well by luck.) None if less than `WORTH_NAMING` is lost.
    """
    speed = sum(1.0 / each for each in sample_s)

    def left(samples: int) -> float:
        best = best_step_s(samples, sample_s, [0.0] * len(sample_s))
        return samples / speed / best

    if len(sample_s) < 2 or batch < 1 or left(batch) >= 1.0 - WORTH_NAMING:
        return None
    larger = (batch << doubling for doubling in range(1, MOST_DOUBLINGS + 1))
    enough = (
        n for n in larger if min(map(left, range(n, 2 * n, n // 8 | 1))) > 1.0 - SMALL
    )
    return left(batch), next(enough, None)
