"""Shares of devices that hold only so many samples: exact, optimal, steady."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elche.cadence.balancer import Balancer
from elche.cadence.split import passes_of, split_for_makespan
from elche.errors import ConfigError

SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Fleet:
    """Ranks, and a batch that is at least as large as their least parts."""

    cost: tuple[float, ...]
    fixed: tuple[float, ...]
    caps: tuple[int | None, ...]
    minimum: int
    total: int

    @property
    def size(self) -> int:
        return len(self.cost)

    def time(self, parts: Sequence[int], *, accumulates: bool = False) -> float:
        """When the last rank is through."""
        return max(
            c * (f * (passes_of(n, cap) if accumulates else 1) + n)
            for c, f, cap, n in zip(
                self.cost, self.fixed, self.caps, parts, strict=True
            )
        )

    def all_splits(self) -> list[tuple[int, ...]]:
        """Every way to divide the batch that keeps the minimum."""
        each = range(self.minimum, self.total + 1)
        heads = itertools.product(each, repeat=self.size - 1)
        splits = [(*head, self.total - sum(head)) for head in heads]
        return [split for split in splits if split[-1] >= self.minimum]

    def split(self, total: int | None = None) -> tuple[int, ...]:
        return split_for_makespan(
            self.total if total is None else total,
            self.cost,
            self.fixed,
            self.minimum,
            self.caps,
        )


@st.composite
def fleets(draw: st.DrawFn, most_ranks: int, most_spare: int) -> Fleet:
    size = draw(st.integers(1, most_ranks))
    minimum = draw(st.integers(1, 3))
    cap = st.none() | st.integers(minimum, minimum + most_spare)
    return Fleet(
        tuple(draw(st.lists(st.floats(0.05, 20.0), min_size=size, max_size=size))),
        tuple(draw(st.lists(st.floats(0.0, 10.0), min_size=size, max_size=size))),
        tuple(draw(st.lists(cap, min_size=size, max_size=size))),
        minimum,
        size * minimum + draw(st.integers(0, most_spare)),
    )


def room(fleet: Fleet) -> int:
    return sum(fleet.total if cap is None else cap for cap in fleet.caps)


def within(parts: Sequence[int], caps: Sequence[int | None]) -> bool:
    return all(
        cap is None or part <= cap for part, cap in zip(parts, caps, strict=True)
    )


@given(fleets(4, 9))
@settings(max_examples=300)
def test_no_split_within_the_caps_is_faster(fleet: Fleet) -> None:
    assume(room(fleet) >= fleet.total)
    parts = fleet.split()
    assert sum(parts) == fleet.total
    assert min(parts) >= fleet.minimum
    assert within(parts, fleet.caps)
    allowed = [split for split in fleet.all_splits() if within(split, fleet.caps)]
    assert fleet.time(parts) <= min(map(fleet.time, allowed)) * SLACK


def _micro_batched(fleet: Fleet) -> tuple[int, ...]:
    return split_for_makespan(
        fleet.total,
        fleet.cost,
        fleet.fixed,
        fleet.minimum,
        fleet.caps,
        accumulates=True,
    )


@given(fleets(4, 9))
@settings(max_examples=300)
def test_no_split_in_micro_batches_is_faster(fleet: Fleet) -> None:
    parts = _micro_batched(fleet)
    assert sum(parts) == fleet.total
    assert min(parts) >= fleet.minimum
    best = min(fleet.time(split, accumulates=True) for split in fleet.all_splits())
    assert fleet.time(parts, accumulates=True) <= best * SLACK


@given(fleets(40, 5000))
def test_large_micro_batched_splits_are_exact(fleet: Fleet) -> None:
    """No sample would end earlier elsewhere, and no cap makes no micro-batches."""
    parts = _micro_batched(fleet)
    assert sum(parts) == fleet.total
    ranks = [
        (c, f, cap, n)
        for c, f, cap, n in zip(fleet.cost, fleet.fixed, fleet.caps, parts, strict=True)
    ]
    late = max(
        (c * (f * passes_of(n, k) + n) for c, f, k, n in ranks if n > fleet.minimum),
        default=0.0,
    )
    early = min(c * (f * passes_of(n + 1, k) + n + 1) for c, f, k, n in ranks)
    assert late <= early * SLACK
    free = split_for_makespan(
        fleet.total,
        fleet.cost,
        fleet.fixed,
        fleet.minimum,
        [None] * fleet.size,
        accumulates=True,
    )
    plain = split_for_makespan(fleet.total, fleet.cost, fleet.fixed, fleet.minimum)
    uncapped = Fleet(
        fleet.cost, fleet.fixed, (None,) * fleet.size, fleet.minimum, fleet.total
    )
    assert uncapped.time(free) == pytest.approx(uncapped.time(plain), rel=1e-9)


def test_a_split_beyond_all_caps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sum to 9, got a sum of 8: \[3, 5"):
        split_for_makespan(9, [1.0, 1.0], [0.0, 0.0], 1, [3, 5])


def balancer(*caps: int | None, size: int = 0, **options: object) -> Balancer:
    config: dict[str, object] = {
        "world_size": size or len(caps),
        "max_samples": caps,
        **options,
    }
    return Balancer(**config)  # type: ignore[arg-type]


@given(
    st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 3),
    st.lists(st.integers(0, 120), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=3),
    st.booleans(),
    st.sets(st.integers(0, 4), max_size=2),
)
@settings(max_examples=300)
def test_shares_are_exact_and_fit_or_are_refused(
    caps: list[int | None],
    minimum: int,
    batches: list[int],
    learned: list[tuple[int, int]],
    accumulates: bool,
    spared: set[int],
) -> None:
    size = len(caps)
    ranks = balancer(*caps, min_share_samples=minimum, accumulates=accumulates)
    if spared & set(range(size)) != set(range(size)):
        ranks.assign_least(spared & set(range(size)))
    for rank, cap in [(0, 10**6), *learned]:
        ranks.limit(rank % size, cap)
        known = tuple(ranks.caps)
        for batch in batches:
            try:
                parts = ranks.sizes(batch)
            except ConfigError:
                assert not _fits(batch, known, minimum, accumulates)
                continue
            assert sum(parts) == batch
            least = min(minimum, batch)
            assert all(part == 0 or part >= least for part in parts)
            able = [rank for rank, most in enumerate(known) if (most or least) >= least]
            if batch >= minimum * len(able):
                assert all(parts[rank] >= least for rank in able)
            for part, most in zip(parts, known, strict=True):
                assert part == 0 or most is None or most >= least
                assert accumulates or most is None or part <= most


def _fits(
    batch: int, caps: Sequence[int | None], minimum: int, accumulates: bool
) -> bool:
    """Whether some ranks hold the batch, each at least the minimum of it."""
    least = min(minimum, batch)
    rooms = sorted(
        batch if cap is None or accumulates else min(cap, batch)
        for cap in caps
        if cap is None or cap >= least
    )
    return batch == 0 or sum(rooms[::-1][: max(1, batch // least)]) >= batch


def test_a_batch_that_no_devices_hold_is_refused_with_what_to_do() -> None:
    message = (
        r"a batch of 21 samples does not fit .*\{0: 8, 1: 12\}, at least 1 each.*"
        r"lower batch_size, raise max_samples .* elche.Trainer"
    )
    with pytest.raises(ConfigError, match=message):
        balancer(8, 12).sizes(21)


def test_spared_ranks_get_the_least_part_or_what_the_others_cannot_hold() -> None:
    ranks = balancer(None, 12)
    ranks.assign_least([0])
    assert ranks.sizes(12) == (1, 11)
    assert ranks.sizes(13) == (1, 12)
    assert ranks.sizes(1) == (0, 1)
    assert ranks.sizes(14)[1] <= 12
    assert sum(ranks.sizes(14)) == 14
    ranks.assign_least([])
    assert ranks.sizes(12) == (6, 6)


def test_a_learned_cap_moves_shares_at_once_and_never_rises() -> None:
    ranks = balancer(size=2)
    assert ranks.sizes(64) == (32, 32)
    ranks.limit(1, 20)
    assert ranks.sizes(64) == (44, 20)
    ranks.limit(1, 30)
    assert ranks.caps == [None, 20]


def test_micro_batches_pay_their_fixed_cost_each() -> None:
    """Two like devices, 20 samples of fixed cost; one holds only 10 at once."""
    ranks = balancer(None, 10, accumulates=True)

    def busy_s(sizes: Sequence[int]) -> list[float]:
        passes = [1, passes_of(sizes[1], 10)]
        return [
            0.020 * k * (n > 0) + 0.001 * n for k, n in zip(passes, sizes, strict=True)
        ]

    for batch in (64, 24, 96, 40) * 5:
        sizes = ranks.sizes(batch)
        ranks.report(sizes, busy_s(sizes))
    for batch in (48, 128):
        best_s = min(max(busy_s((batch - n, n))) for n in range(1, batch))
        assert max(busy_s(ranks.sizes(batch))) <= 1.05 * best_s


def test_no_reductions_are_saved_where_a_rank_alone_runs_micro_batches() -> None:
    """Once: those of the whole share, of each micro-batch: 24 ms, where 32 are true."""
    balancer = Balancer(2, max_samples=[8, None], accumulates=True)
    for _ in range(10):
        balancer.report([16, 16], [0.016 + 0.004, 0.016])
    assert balancer.step_s(32, [1], 0.004) == pytest.approx(0.040)
