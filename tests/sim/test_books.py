"""The account of models finds what it is there to find."""

from __future__ import annotations

from typing import Any

import pytest

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.protocol.instructions import Reduce
from tests.sim.books import Books, Part


def reduce(rank: int, weight: float, **changes: Any) -> Reduce:
    values: dict[str, Any] = {
        "rank": rank,
        "epoch": 0,
        "window": 0,
        "attempt": 0,
        "weight": weight,
        "active_ranks": 2,
        "buffers": (),
        "outer": "average",
        "outer_lr": 1.0,
        "outer_momentum": 0.5,
    }
    return Reduce(**(values | changes))


def trained(*batches: int) -> Books:
    """A batch on each rank, offered to window 0."""
    books = Books()
    for rank, batch in enumerate(batches):
        books.trained(rank, 0, [(2 * batch, 2 * batch + 2)])
        books.offer(rank, 0)
    return books


def plans_of(*weights: float, **changes: Any) -> dict[int, Reduce]:
    return {rank: reduce(rank, w, **changes) for rank, w in enumerate(weights)}


def test_a_reduction_brings_everything_to_everybody() -> None:
    books = trained(0, 1)
    common = books.reduce(plans_of(0.5, 0.5))
    for rank in (0, 1):
        books.adopt(rank, 0, common)
    assert books.check_epoch((0, 1), 0, BatchSizes(((2, 2),)), whole=True) == {0, 1}


@pytest.mark.parametrize(
    ("batches", "plans", "said"),
    [
        ((0, 1), plans_of(0.5, 0.4), "weights sum to 0.9"),
        ((0, 1), plans_of(1.0, 0.0), "rank 1 weighs 0.0"),
        ((0, 1), {0: reduce(0, 0.5), 1: reduce(1, 0.5, outer_lr=0.7)}, "ranks differ"),
        ((0, 1), {0: reduce(0, 0.5), 1: reduce(1, 0.5, window=1)}, "different windows"),
        ((0, 1), plans_of(0.5, 0.5, window=3), "not ended"),
    ],
)
def test_a_reduction_that_ranks_mean_differently_is_found(
    batches: tuple[int, ...], plans: dict[int, Reduce], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        trained(*batches).reduce(plans)


def test_a_rank_that_missed_a_result_is_found() -> None:
    books = trained(0, 1)
    books.adopt(0, 0, books.reduce(plans_of(0.5, 0.5)))
    with pytest.raises(AssertionError, match="hold models"):
        books.check_epoch((0, 1), 0, BatchSizes(((2, 2),)), whole=True)


@pytest.mark.parametrize(
    ("batches", "said"),
    [((0, 0), "position 0 is in twice"), ((0, 2), r"missing \[\(2, 4\)\]")],
)
def test_a_batch_lost_or_counted_twice_is_found(
    batches: tuple[int, ...], said: str
) -> None:
    books = trained(*batches)
    common = books.reduce(plans_of(0.5, 0.5))
    for rank in (0, 1):
        books.adopt(rank, 0, common)
    with pytest.raises(AssertionError, match=said):
        books.check_epoch((0, 1), 0, BatchSizes(((2, 3),)), whole=True)


def test_a_part_that_is_lost_when_a_model_is_taken_over_is_found() -> None:
    books = trained(0, 1, 2)
    books.adopt(0, 0, books.reduce(plans_of(0.5, 0.5)))
    books.take(1, 0, 0)
    with pytest.raises(AssertionError, match="is lost with window 0"):
        books.take(2, 0, 0)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (((0, 0, 1), (0, 1, 3)), r"missing \[\(3, 6\)\]"),
        (((0, 0, 1), (0, 3, 6)), r"missing \[\(1, 3\)\]"),
        (((0, 0, 2), (0, 1, 3)), "position 1 is in twice"),
    ],
)
def test_a_part_of_a_batch_lost_or_counted_twice_is_found(
    parts: tuple[Part, Part], said: str
) -> None:
    books = Books()
    for rank, part in enumerate(parts):
        books.model(rank).drift.append(part)
        books.offer(rank, 0)
    common = books.reduce(plans_of(0.5, 0.5))
    for rank in (0, 1):
        books.adopt(rank, 0, common)
    sizes = BatchSizes(((3, 2),))
    with pytest.raises(AssertionError, match=said):
        books.check_epoch((0, 1), 0, sizes, whole=True)
