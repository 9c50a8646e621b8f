"""Best possible step of a batch of whole samples on ranks of known costs.

What no synchronous data parallelism can undercut: a sample is not divided, and each
rank that has any pays its time per batch (fixed cost of a pass, optimizer) beside its
samples' time; the longest one is the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from elche.cadence.split import split_for_makespan

WORTH_NAMING = 0.05
"""Part of a step lost to whole samples above which it is named."""
SMALL = 0.02
"""Part below which a batch is large enough."""
MOST_DOUBLINGS = 10
"""Larger batches than 2^10 times this one are no advice."""


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
    """What whole samples leave of a batch's speed, and a batch that is large enough.

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
