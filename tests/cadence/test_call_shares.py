"""Splits of `elche.share`: the same on every rank, whole, and by delivered speed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence.call_shares import CallShares
from elche.errors import ConfigError, ProtocolError

SPEEDS = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5)


def train(
    speeds: list[float], n: int, calls: int, per_report: int = 1
) -> list[list[range]]:
    """The parts of all ranks in each call; the ranks wait for the slowest one."""
    ranks = [CallShares(rank, len(speeds)) for rank in range(len(speeds))]
    clocks_s, found = [0.0] * len(speeds), []
    for call in range(calls):
        parts = [ranks[at].split(n, now_s) for at, now_s in enumerate(clocks_s)]
        found.append(parts)
        for rank, (part, speed) in enumerate(zip(parts, speeds, strict=True)):
            clocks_s[rank] += 0.01 + len(part) * 1e-3 / speed
        if call % per_report:
            continue
        end_s = max(clocks_s)
        for rank, each in enumerate(ranks):
            each.exclude_wait(end_s - clocks_s[rank])
            clocks_s[rank] = end_s
        rows = [each.facts() for each in ranks]
        for each in ranks:
            each.report(rows)
    return found


@given(SPEEDS, st.integers(1, 100), st.integers(1, 3))
def test_parts_cover_the_samples_once(
    speeds: list[float], n: int, per_report: int
) -> None:
    for parts in train(speeds, n, 12, per_report):
        assert [at for part in parts for at in part] == list(range(n))
        assert n < len(speeds) or all(parts)


@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=4, unique=True))
def test_a_faster_rank_gets_no_smaller_part(speeds: list[float]) -> None:
    ordered = sorted(speeds, reverse=True)
    last = [len(part) for part in train(ordered, 400, 20)[-1]]
    # A split stays until another one would save 3 % of the step.
    assert all(more >= 0.9 * less for more, less in pairwise(last))


@pytest.mark.parametrize("per_report", [1, 4])
def test_parts_follow_a_ratio_of_four(per_report: int) -> None:
    parts = train([1.0, 0.25], 320, 20, per_report)
    assert [len(part) for part in parts[0]] == [160, 160]
    assert abs(len(parts[-1][0]) / len(parts[-1][1]) - 4.0) < 0.4


@pytest.mark.parametrize("n", [0, -1, 2.5, "8"])
def test_a_wrong_number_is_refused(n: object) -> None:
    with pytest.raises(ConfigError, match="n"):
        CallShares(0, 1).split(n, 0.0)  # type: ignore[arg-type]


def test_ranks_that_split_differently_are_named() -> None:
    """Their parts overlap, which the weights of a reduction do not show."""
    first, second = CallShares(0, 2), CallShares(1, 2)
    first.report([(10, 1.0, 0.0), (10, 4.0, 0.0)])
    for each in (first, second):
        each.split(20, 0.0)
    with pytest.raises(ProtocolError, match="different n, or not equally often"):
        first.report([first.facts(), second.facts()])
