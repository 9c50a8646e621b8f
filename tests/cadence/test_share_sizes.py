"""Sizes of shares: few in a run, and splits that are made of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.balancer import Balancer
from elche.cadence.share_sizes import LAST_PRICE, MAX_SIZES, ShareSizes
from elche.cadence.split import clip_split, pick_sizes, split_from_sizes
from tests.harness.reached import reach

EPOCH_STEPS = 50


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_sizes_are_picked_wherever_some_make_up_the_batch(
    sizes: list[list[int]], total: int
) -> None:
    picked = pick_sizes(total, sizes)
    found = [split for split in itertools.product(*sizes) if sum(split) == total]
    assert (picked is None) == (not found)
    assert picked is None or picked in found


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 12), max_size=4), st.floats(0.1, 9.0)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 30),
)
def test_no_other_split_of_the_sizes_is_shorter(
    ranks: list[tuple[list[int], float]], total: int
) -> None:
    def end(rank: int, part: int) -> float:
        return ranks[rank][1] * part

    def longest(split: Sequence[int]) -> float:
        return max(map(end, range(len(split)), split))

    sizes = [known for known, _ in ranks]
    split = split_from_sizes(total, sizes, end)
    found = [each for each in itertools.product(*sizes) if sum(each) == total]
    assert (split is None) == (not found)
    if split is not None:
        assert sum(split) == total
        assert longest(split) == min(map(longest, found))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.integers(1, 2),
    st.data(),
)
def test_columns_of_a_smaller_batch_keep_their_rank(
    extra: list[int], minimum: int, data: st.DataObject
) -> None:
    parts = [minimum + more - 1 if more else 0 for more in extra]
    serving = sum(part > 0 for part in parts)
    total = data.draw(st.integers(0, sum(parts)))
    clipped = clip_split(parts, total, minimum)
    if total < minimum * serving:
        assert clipped is None
        return
    assert clipped is not None
    assert sum(clipped) == total
    owners = [rank for rank, part in enumerate(parts) for _ in range(part)]
    now = [rank for rank, part in enumerate(clipped) for _ in range(part)]
    for rank, (part, left) in enumerate(zip(parts, clipped, strict=True)):
        assert left >= minimum if part else left == 0
        assert left <= max(part, minimum), rank
    moved = [at for at in range(total) if owners[at] != now[at]]
    assert all(at >= total - minimum * (serving - 1) for at in moved)


@pytest.mark.reaches("a tail", "noisy first steps", "six sizes", "a trial")
@given(
    st.integers(2, 8),
    st.sampled_from((8, 32, 128)),
    st.sampled_from((0.0, 0.5)),
    st.sampled_from((0.03, 0.1)),
    st.integers(0, 2**32),
)
@settings(max_examples=20, deadline=None)
def test_a_long_noisy_run_has_few_sizes(
    world_size: int, each: int, fixed: float, noise: float, seed: int
) -> None:
    """Drawn three steps ahead, with tails, trials, and first steps of any speed."""
    rng, batch = random.Random(seed), each * world_size
    cost_s = [rng.choice((1.0, 1.3, 2.0, 4.0)) for _ in range(world_size)]
    ranks = Balancer(world_size)
    seen: list[set[int]] = [set() for _ in range(world_size)]
    drawn, waited = [ranks.sizes(batch)] * 3, 0
    for step in range(400):
        total = batch if step % EPOCH_STEPS else 3 * batch // 8
        tried = ranks.trial(total, waited)
        waited = waited + 1 if tried is None else -3
        drawn.append(tried or ranks.sizes(total))
        sizes = drawn.pop(0)
        spread = 1.0 if step < 5 else 0.0
        busy_s = [
            (fixed * each + n) * cost * rng.gauss(1.0, noise) * 4.0 ** (spread * lag)
            for n, cost, lag in zip(
                sizes, cost_s, [rng.uniform(-0.5, 0.5) for _ in sizes], strict=True
            )
        ]
        ranks.report(sizes, [max(1e-3, time_s) for time_s in busy_s])
        for of_rank, size in zip(seen, sizes, strict=True):
            of_rank.add(size)
        reach("a tail", sum(sizes) < batch)
        reach("a trial", tried is not None)
    reach("noisy first steps")
    reach("six sizes", max(map(len, seen)) >= 6)
    # One more where a step without it would take a third longer: in few of 1000 runs.
    assert max(map(len, seen)) <= MAX_SIZES + 1
    assert all(of <= set(used) for of, used in zip(seen, ranks.used_sizes, strict=True))


def test_a_size_costs_the_more_the_more_there_were() -> None:
    def steps_until_worth(had: int, gain: float) -> int:
        sizes = ShareSizes([range(1, had + 1)])
        for step in range(1, 10_000):
            if sizes.is_worth([had + 1], gain, 1, True):
                return step
        return 0

    waits = [steps_until_worth(had, 0.125) for had in range(1, 9)]
    assert waits == [1, 1, 2, 4, 7, 24, 0, 0]
    assert [steps_until_worth(had, 0.5) for had in (5, 6)] == [1, 1]
    assert [steps_until_worth(had, 0.5) for had in (7, 8)] == [2 * LAST_PRICE] * 2


@pytest.mark.parametrize(
    ("used", "part", "most", "later", "expected"),
    [
        ([4, 8, 16], 4, 10, 10, 8),  # the largest known that is affordable
        ([4], 4, 10, 10, 10),  # a new one
        ([4], 10, 11, 11, None),  # too little larger
        ([1, 2, 3, 4, 16], 4, 10, 12, None),
        ([1, 2, 3, 4, 16], 4, 10, 16, 16),  # a known one, if it takes long to pay
    ],
)
def test_trials_are_of_known_sizes_first(
    used: list[int], part: int, most: int, later: int, expected: int | None
) -> None:
    assert ShareSizes([used]).trial(0, part, most, later) == expected
