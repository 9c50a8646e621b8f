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

BISECTIONS = 100
"""Enough to come from any level to the next float."""
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
) -> tuple[int, ...]:
    """Integer parts that minimise ``max(cost[r] * (fixed_samples[r] + n[r]))``.

    Giving one sample after the other to the rank that would finish it first is
    optimal, as each rank's time only grows. The real-valued solution with every
    part rounded down is a state which that passes, so only the fewer than W last
    samples are given that way: O(W log W), whatever the total. A rank whose part
    exceeds its cap has reached that under the caps as well, so it gets just that,
    and the others divide the rest anew.

    Args:
        total: samples to distribute, at least ``minimum`` for every rank.
        cost: time per sample of each rank, positive.
        fixed_samples: fixed cost of each rank in samples, not negative.
        minimum: smallest part of a rank.
        caps: largest part of each rank, at least ``minimum``; None for any size.

    Returns:
        One part per rank, together ``total``; of equal choices the lowest ranks.

    Raises:
        ConfigError: the caps are together below ``total``.
    """
    if caps is None:
        return _split_free(total, cost, fixed_samples, minimum)
    room = [total if cap is None else cap for cap in caps]
    if sum(room) < total:
        raise ConfigError(
            f"expected the caps to be {total} together, got {sum(room)}: {room}"
        )
    parts = list(room)
    ranks, left = list(range(len(cost))), total
    while True:
        free = _split_free(
            left, [cost[r] for r in ranks], [fixed_samples[r] for r in ranks], minimum
        )
        full = {r for r, part in zip(ranks, free, strict=True) if part > room[r]}
        if not full:
            break
        left -= sum(room[r] for r in full)
        ranks = [r for r in ranks if r not in full]
    for rank, part in zip(ranks, free, strict=True):
        parts[rank] = part
    return tuple(parts)


def split_in_micro_batches(
    total: int,
    cost: Sequence[float],
    fixed_samples: Sequence[float],
    minimum: int,
    caps: Sequence[int | None],
) -> tuple[int, ...]:
    """Parts for the shortest step of ranks that run large parts in micro-batches.

    As :func:`split_for_makespan`, but a cap limits no part: every ``caps[r]`` samples
    that a rank begins cost it the fixed time again. Its times still only grow, so the
    same order of giving is optimal; a state which that passes is found by bisection.
    O(W) for each of `BISECTIONS` levels.

    Args:
        total: samples to distribute, at least ``minimum`` for every rank.
        cost: time per sample of each rank, positive.
        fixed_samples: fixed cost of a micro-batch of each rank in samples.
        minimum: smallest part of a rank.
        caps: samples of a micro-batch at most; None for any size.

    Returns:
        One part per rank, together ``total``; of equal choices the lowest ranks.
    """

    def end(rank: int, part: int) -> float:
        passes = passes_of(part, caps[rank])
        return cost[rank] * (fixed_samples[rank] * passes + part)

    def done_by(rank: int, level: float) -> int:
        cap, fixed = caps[rank] or total, fixed_samples[rank]
        passes, rest = divmod(level / cost[rank], fixed + cap)
        return max(minimum, int(passes) * cap + max(0, math.floor(rest - fixed)))

    ranks = range(len(cost))
    low, high = 0.0, min(end(rank, total) for rank in ranks)
    for _ in range(BISECTIONS):
        level = (low + high) / 2
        if not low < level < high:
            break
        if sum(done_by(rank, level) for rank in ranks) <= total:
            low = level
        else:
            high = level
    parts = [done_by(rank, low) for rank in ranks]
    ends = [(end(rank, part + 1), rank) for rank, part in enumerate(parts)]
    _give_rest(parts, total, ends, end)
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


def fluid_step_s(
    batch: int, sample_s: Sequence[float], batch_s: Sequence[float]
) -> float:
    """Likewise if samples could be divided: all ranks that serve end together."""
    load, rate, level = float(batch), 0.0, float("inf")
    for once, each in sorted(zip(batch_s, sample_s, strict=True)):
        if level <= once:
            break
        load += once / each
        rate += 1.0 / each
        level = load / rate
    return level


def whole_sample_bound(
    batch: int, sample_s: Sequence[float], batch_s: Sequence[float]
) -> tuple[float, int | None] | None:
    """Fraction of speed that whole samples leave, and a batch that is large enough.

    Returns:
        The part left, and the first doubling of the batch from which on less than
        `SMALL` is lost (None if there is none; of larger ones a few are tried, as a
        single size may divide well by luck); None where less than `WORTH_NAMING` is.
    """

    def left(samples: int) -> float:
        best = best_step_s(samples, sample_s, batch_s)
        return fluid_step_s(samples, sample_s, batch_s) / best

    if len(sample_s) < 2 or batch < 1 or left(batch) >= 1.0 - WORTH_NAMING:
        return None
    larger = (batch << doubling for doubling in range(1, MOST_DOUBLINGS + 1))
    enough = (
        n for n in larger if min(map(left, range(n, 2 * n, n // 8 | 1))) > 1.0 - SMALL
    )
    return left(batch), next(enough, None)


def _split_free(
    total: int, cost: Sequence[float], fixed_samples: Sequence[float], minimum: int
) -> tuple[int, ...]:
    """The split of ranks that hold as much as they get."""
    ranks = range(len(cost))
    start = [cost[r] * (fixed_samples[r] + minimum) for r in ranks]
    order = sorted(ranks, key=start.__getitem__)
    load, rate, level = float(total - minimum * len(cost)), 0.0, 0.0
    parts = [minimum] * len(cost)
    for place, rank in enumerate(order, start=1):
        load += fixed_samples[rank] + minimum
        rate += 1.0 / cost[rank]
        level = load / rate
        if place == len(order) or level <= start[order[place]]:
            break
    for rank in order[:place]:
        parts[rank] = max(minimum, math.floor(level / cost[rank] - fixed_samples[rank]))
    while sum(parts) > total:
        late = max(
            (r for r in ranks if parts[r] > minimum),
            key=lambda r: cost[r] * (fixed_samples[r] + parts[r]),
        )
        parts[late] -= 1
    ends = [(cost[r] * (fixed_samples[r] + parts[r] + 1), r) for r in ranks]
    _give_rest(parts, total, ends, lambda r, n: cost[r] * (fixed_samples[r] + n))
    return tuple(parts)


def _give_rest(
    parts: list[int],
    total: int,
    ends: list[tuple[float, int]],
    end: Callable[[int, int], float],
) -> None:
    """Gives each missing sample to the rank that would finish it first.

    Args:
        parts: so far; completed.
        total: what they are to be together.
        ends: when each rank would finish one sample more, and the rank.
        end: when a rank would finish a part.
    """
    heapq.heapify(ends)
    for _ in range(total - sum(parts)):
        rank = ends[0][1]
        parts[rank] += 1
        heapq.heapreplace(ends, (end(rank, parts[rank] + 1), rank))
