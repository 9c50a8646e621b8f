"""Split of a batch among ranks of unlike speed and memory, for a short step.

`best_step_s` is what no synchronous data parallelism can undercut: a sample is not
divided, and each rank that has any pays its time per batch (fixed cost of a pass,
optimizer) beside its samples' time; the longest one is the step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from elche.errors import ConfigError

WORTH_NAMING = 0.05
"""Part of a step lost to whole samples above which it is named."""
SMALL = 0.02
"""Part below which a batch is large enough."""
MOST_DOUBLINGS = 10
"""Larger batches than 2^10 times this one are no advice."""


def split_for_makespan(
    total: int,
    cost: Sequence[float],
    fixed_samples: Sequence[float],
    minimum: int,
    caps: Sequence[int | None] | None = None,
    *,
    accumulates: bool = False,
) -> tuple[int, ...]:
    """Integer parts for the shortest step.

    A rank ends its part ``n`` after ``cost * (fixed_samples + n)``. Giving one sample
    after the other to the rank that would finish it first is optimal, as each rank's
    time only grows. A state which that passes is found by bisection of the time, so
    that only the fewer than W last samples are given that way. The first guess, of
    samples that could be divided, is mostly such a state.

    Args:
        total: samples to distribute, at least ``minimum`` for every rank.
        cost: time per sample of each rank, positive.
        fixed_samples: fixed cost of each rank in samples, not negative.
        minimum: smallest part of a rank.
        caps: largest part of each rank, at least ``minimum``; None for any size.
        accumulates: a cap limits no part, but every ``caps[r]`` samples that a rank
            begins (a micro-batch) cost it the fixed time again.

    Returns:
        One part per rank, together ``total``; of equal choices the lowest ranks.

    Raises:
        ConfigError: the caps are together below ``total``.
    """
    ranks = range(len(cost))
    known = caps or [None for _ in ranks]
    passing = [cap if accumulates else None for cap in known]
    room = [total if accumulates or cap is None else cap for cap in known]
    if sum(room) < total:
        raise ConfigError(
            f"expected the caps to be {total} together, got {sum(room)}: {room}"
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
    """A smaller batch divided where a larger one was, so that its samples keep ranks.

    Only the last ones go to later ranks, where these would have less than the minimum.

    Args:
        parts: of the larger batch, each at least the minimum or 0.
        total: samples of the smaller one.
        minimum: smallest part of a rank that has any.

    Returns:
        One part per rank, together ``total``; None if that is too small for all.
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
    """One of its sizes for each rank, together ``total``; None if there are none such.

    The sums that some ranks can reach are bits of one integer, so a rank's size shifts
    them all at once: O(W * sizes) operations on integers of ``total`` bits.

    Args:
        total: samples to distribute.
        sizes: of each rank; where several would do, the first one is taken.
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
    """Parts from each rank's sizes for the shortest step; None if there are none.

    Args:
        total: samples to distribute.
        sizes: that each rank may have.
        end: when a rank would finish a part.
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
    """Micro-batches in which so many samples are run."""
    return 1 if cap is None else max(1, -(-samples // cap))


def given_step_s(
    parts: Sequence[int], sample_s: Sequence[float], batch_s: Sequence[float]
) -> float:
    """Seconds of a step with these samples on each rank; a rank may have none."""
    costs = zip(parts, sample_s, batch_s, strict=True)
    return max((fixed + part * each for part, each, fixed in costs if part), default=0)


def best_step_s(
    batch: int, sample_s: Sequence[float], batch_s: Sequence[float]
) -> float:
    """Seconds of the shortest step; ranks whose time per batch is too long have none.

    Args:
        batch: samples of the global batch.
        sample_s: seconds per sample of each rank, positive.
        batch_s: seconds per batch of each rank that has samples, not negative.
    """
    fixed = [once / each for once, each in zip(batch_s, sample_s, strict=True)]
    parts = split_for_makespan(batch, sample_s, fixed, 0)
    return given_step_s(parts, sample_s, batch_s)


def whole_sample_bound(
    batch: int, sample_s: Sequence[float]
) -> tuple[float, int | None] | None:
    """Fraction of speed that whole samples leave, and a batch that is large enough.

    Returns:
        The part left, and the first doubling of the batch from which on less than
        `SMALL` is lost (None if there is none; of larger ones a few are tried, as a
        single size may divide well by luck); None where less than `WORTH_NAMING` is.
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
