"""Checksums of models: which slice, what counts as equal, and what is said."""

from __future__ import annotations

import math
from itertools import chain

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elche.coordination.accounts.model_checks import (
    LEAST_VALUES,
    MOST_VALUES,
    SLICES,
    ModelCheck,
    ModelChecks,
    parted,
    plan_slices,
)
from elche.errors import MismatchError
from tests.harness.reached import reach

shapes = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=12
)
ONE_ROUNDING = 1e-7


def check(at: int = 8, what: str = "w", kind: str = "CPU", bits: int = 0) -> ModelCheck:
    return ModelCheck(at, what, kind, bits, 10_000, ONE_ROUNDING, 3.0, 100.0)


@given(shapes)
@example([(3, 2 * LEAST_VALUES)])
def test_slices_cover_every_value_once(shapes: list[tuple[int, int]]) -> None:
    slices = plan_slices(shapes)
    pieces = list(chain.from_iterable(slices))
    covered = [(at, row) for at, first, stop in pieces for row in range(first, stop)]
    assert covered == [
        (at, row)
        for at, (rows, values) in enumerate(shapes)
        for row in range(rows)
        if values
    ]
    total = sum(rows * values for rows, values in shapes)
    widest = max(values for _, values in shapes)
    most = min(MOST_VALUES, max(LEAST_VALUES, math.ceil(total / SLICES)))
    for each in slices:
        size = sum((b - a) * shapes[at][1] for at, a, b in each)
        assert size <= max(most, widest)


@pytest.mark.reaches("parted", "equal", "a minority of the lowest")
@given(st.dictionaries(st.integers(0, 9), st.integers(0, 1), min_size=1))
def test_the_minority_is_named_against_the_others(held: dict[int, int]) -> None:
    """Never a rank against itself, whoever reported first."""
    sides = parted({rank: check(bits=bits) for rank, bits in held.items()})
    if len({*held.values()}) == 1:
        reach("equal")
        assert sides is None
        return
    reach("parted")
    assert sides is not None
    others, same = sides
    assert sorted([*others, *same]) == sorted(held)
    assert {held[rank] for rank in others}.isdisjoint(held[rank] for rank in same)
    assert len(same) >= len(others)
    if min(held) in others:
        reach("a minority of the lowest")
        assert len(same) > len(others)


@pytest.mark.parametrize(
    ("change", "is_near"),
    [
        ({"total": 3.0 + 2e-3}, True),  # 1024 roundings of each of 10,000 values
        ({"total": 3.0 + 4e-3}, False),
        ({"squares": 100.0 * (1 + 5e-4)}, True),
        ({"squares": 100.0 * (1 + 2e-3)}, False),
        ({"total": math.nan}, True),  # said by those who look for it
        ({"what": "v", "total": 9.0}, True),  # of another tensor: nothing to compare
    ],
)
def test_two_kinds_may_differ_by_rounding(
    change: dict[str, float], is_near: bool
) -> None:
    other = check(kind="GPU", bits=7)._replace(**change)  # type: ignore[arg-type]
    checks = {0: check(), 1: other, 2: check()}
    assert (parted(checks) is None) == is_near
    assert is_near or parted(checks) == ([1], [0, 2])


def test_the_error_says_between_which_steps_and_which_ranks() -> None:
    checks = ModelChecks("after step {at} of epoch 3")
    for at, what in ((8, "w"), (16, "v")):
        rows = dict.fromkeys((0, 1, 2), (check(at, what),))
        checks.compare(rows)
    late = {0: (check(24, bits=5),), 1: (check(24),), 2: (check(24),)}
    with pytest.raises(
        MismatchError,
        match=r"^ranks \[0\] and \[1, 2\] hold different values in w after step 24 of "
        r"epoch 3; they were equal after step 8 of epoch 3; usual causes: .*noise",
    ):
        checks.compare(late)
    checks = ModelChecks("after step {at}")
    with pytest.raises(MismatchError, match=r"equal where the epoch, or its last part"):
        checks.compare(late)


def test_only_what_ranks_report_of_one_place_is_compared() -> None:
    """Ranks that are excluded, or that report of other steps, are not accused."""
    ModelChecks("after step {at}").compare(
        {0: (check(8), check(16)), 1: (check(16),), 2: (), 3: (check(24, bits=3),)}
    )
