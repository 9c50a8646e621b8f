"""Shares of a global batch: exact, optimal, steady, and quick to follow."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.balancer import Balancer


def balancer(world_size: int = 2, **options: object) -> Balancer:
    return Balancer(world_size, **options)  # type: ignore[arg-type]


@given(
    st.integers(1, 6).flatmap(
        lambda size: st.tuples(
            st.lists(st.floats(0.01, 100.0), min_size=size, max_size=size),
            st.lists(
                st.tuples(
                    st.lists(st.integers(0, 99), min_size=size, max_size=size),
                    st.lists(st.floats(0.0, 1e30), min_size=size, max_size=size),
                ),
                max_size=10,
            ),
        )
    ),
    st.integers(1, 5),
    st.lists(st.integers(0, 200), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_sizes_are_exact_and_fair_after_any_reports(
    fleet: tuple[list[float], list[tuple[list[int], list[float]]]],
    minimum: int,
    batches: list[int],
) -> None:
    hints, reports = fleet
    size = len(hints)
    ranks = Balancer(world_size=size, min_share_samples=minimum, speed_hints=hints)
    for report in [([0] * size, [0.0] * size), *reports]:
        ranks.report(*report)
        for batch in batches:
            parts = ranks.sizes(batch)
            assert len(parts) == size
            assert sum(parts) == batch
            if batch >= size * minimum:
                assert min(parts) >= minimum
            elif batch >= minimum:
                assert all(part == 0 or part >= minimum for part in parts)
            else:
                assert max(parts) == batch
            assert ranks.sizes(batch) == parts


@pytest.mark.parametrize(
    ("options", "batch", "expected"),
    [
        ({}, 32, (16, 16)),
        ({}, 33, (17, 16)),
        ({"speed_hints": {1: 0.25}}, 40, (32, 8)),
        ({"speed_hints": [1.0, 1e-9]}, 40, (39, 1)),
        ({"speed_hints": [1.0, 0.25], "min_share_samples": 12}, 40, (28, 12)),
        ({"speed_hints": [0.25, 1.0], "min_share_samples": 12}, 20, (0, 20)),
        ({"speed_hints": [0.25, 1.0]}, 1, (0, 1)),
        ({}, 0, (0, 0)),
    ],
)
def test_before_measurements_shares_are_equal_or_as_hinted(
    options: dict[str, object], batch: int, expected: tuple[int, ...]
) -> None:
    ranks = balancer(2, **options)
    assert not ranks.is_calibrated
    assert ranks.sizes(batch) == expected


def test_a_slow_rank_gets_slack_as_its_times_scatter() -> None:
    """A few hundredths of its share at 10 %; equal ranks keep equal shares."""

    def split(cost: float, scatter: float) -> tuple[int, ...]:
        ranks = balancer(2)
        for step in range(200):
            factor = 1.0 + (scatter if step % 2 else -scatter)
            ranks.report([500, 500], [5.0 * factor, 5.0 * cost * factor])
        return ranks.sizes(1000)

    assert 197 <= split(4.0, 0.0)[1] <= 200
    assert split(1.0, 0.1) == (500, 500)
    shares = [split(4.0, scatter)[1] for scatter in (0.0, 0.05, 0.1, 0.2)]
    assert shares == sorted(shares, reverse=True)
    assert 180 <= shares[2] < 195


def test_a_rank_without_samples_keeps_its_model() -> None:
    ranks = balancer(2)
    ranks.report([16, 16], [0.1, 0.4])
    before = pickle.dumps(ranks._models)
    ranks.report([0, 16], [5.0, 0.0])
    assert pickle.dumps(ranks._models) == before


@pytest.mark.parametrize(("slower", "changes"), [(1.04, False), (1.12, True)])
def test_the_split_changes_only_for_a_gain(slower: float, changes: bool) -> None:
    ranks = balancer(2)
    ranks.report([500, 500], [5.0, 5.0])
    assert ranks.sizes(1000) == (500, 500)
    for _ in range(2):  # one slow step is a straggler, two are a speed
        assert ranks.sizes(1000) == (500, 500)
        ranks.report([500, 500], [5.0, 7.5])
    changed = ranks.sizes(1000)
    # 12.5 ms a sample: 6.25 s become 5.56 s. The jump counts as spread for a while.
    assert sum(changed) == 1000
    assert 430 <= changed[1] <= 444
    fast, slow = changed
    for _ in range(20):  # a third size for the gain of some reports
        ranks.report(changed, [0.01 * fast, 0.0125 * slow * slower])
        ranks.sizes(1000)
    assert (ranks.sizes(1000) != changed) == changes


def test_one_small_batch_teaches_the_fixed_cost() -> None:
    ranks = balancer(2)
    for batch in (128,) * 10 + (40,):
        first, second = sizes = ranks.sizes(batch)
        ranks.report(sizes, [0.001 * first, 0.020 + 0.001 * second])
    assert ranks.sizes(60) == pytest.approx((40, 20), abs=1)  # not (32, 28)


def test_only_the_latest_batch_sizes_are_remembered() -> None:
    ranks = balancer(2)
    for batch in range(100):
        ranks.sizes(batch)
    assert len(ranks._kept) == 16


def test_a_rank_left_out_and_back_brings_no_new_sizes() -> None:
    """Once: two new sizes an epoch, as splits were chosen anew each time."""
    shares, split = balancer(3), (0, 0, 0)
    sizes: set[int] = set()
    noise = random.Random(0)
    for _epoch in range(60):
        for left_out in ((), (2,)):
            shares.exclude(left_out)
            split = shares.sizes(256)
            sizes.add(split[0])
            busy_s = [
                n * (1 + 9 * (r == 2)) * noise.gauss(1, 0.1)
                for r, n in enumerate(split)
            ]
            shares.report(split, [max(0.0, each) for each in busy_s])
    assert len(sizes) <= 8


@given(
    slow=st.floats(1.2, 6.0),
    cold_s=st.floats(0.0, 1.0),
    falls=st.lists(st.floats(3.0, 20.0), max_size=4),
)
@settings(deadline=None)
def test_equal_warm_up_on_all_ranks_is_forgotten_at_the_second_warm_step(
    slow: float, cold_s: float, falls: list[float]
) -> None:
    def busy_s(rank: int, samples: int) -> float:
        return 0.004 + (0.00125, 0.00125 * slow)[rank] * samples

    ranks = Balancer(2)
    colds_s = [cold_s]
    for fall in falls:
        colds_s.append(colds_s[-1] / fall)
    for extra_s in (*colds_s, 0.0, 0.0):
        parts = ranks.sizes(32)
        ranks.report(parts, [busy_s(r, n) + extra_s for r, n in enumerate(parts)])
    best_s = min(max(busy_s(0, n), busy_s(1, 32 - n)) for n in range(1, 32))
    step_s = max(map(busy_s, range(2), ranks.sizes(32)))
    assert step_s <= 1.12 * best_s


@pytest.mark.parametrize("longer", [0.2, 0.5])
@pytest.mark.parametrize("slow", [1.5, 2.5, 4.0, 6.0])
def test_shares_outgrow_first_steps_that_take_a_little_longer(
    slow: float, longer: float
) -> None:
    # Once they were one sample off, and steps 6 % too long, for thirty steps.
    def busy_s(rank: int, samples: int) -> float:
        return 0.0045 + (0.00125, 0.00125 * slow)[rank] * samples

    ranks = Balancer(2)
    for number in range(3):
        parts, factor = ranks.sizes(32), 1.0 + longer * 0.6**number
        cold_s = 0.0 if number else 0.2
        ranks.report(
            parts, [cold_s + factor * busy_s(r, n) for r, n in enumerate(parts)]
        )
    best_s = min(max(busy_s(0, n), busy_s(1, 32 - n)) for n in range(1, 32))
    assert max(map(busy_s, range(2), ranks.sizes(32))) == pytest.approx(best_s)
