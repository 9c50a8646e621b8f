"""What averaging saves and loads: the same bits as if nothing had come between."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.comm.averaging.cases.averager_state_cases import (
    Saved,
    Work,
    build,
    load_others,
    lose_a_rank,
    train,
)
from tests.comm.averaging.cases.overlap_cases import meeting
from tests.distributed.cases.tasks import difference, identical
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

WORKS = {
    "blocking": Work(transport="shared", outer="slowmo"),
    "blocking-int8": Work(codec="int8"),
    "blocking-half": Work(dtype="bfloat16", codec="int4", outer="average"),
    "overlapped": Work(is_overlapped=True, transport="shared"),
    "overlapped-int4": Work(is_overlapped=True, codec="int4", outer="slowmo"),
    "overlapped-half": Work(is_overlapped=True, dtype="bfloat16", codec="bf16"),
}


@pytest.fixture(scope="module")
def fresh2() -> Iterator[RankPool]:
    """Processes in which nothing was averaged before."""
    with RankPool(2) as pool:
        yield pool


def same(one: Any, other: Any) -> bool:
    """Whether two saved values are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(same(a, b) for a, b in pairs)
    return bool(one == other)


@pytest.mark.parametrize("name", WORKS)
def test_going_on_from_a_saved_state_gives_the_same_bits(
    ranks2: RankPool, fresh2: RankPool, name: str
) -> None:
    work = WORKS[name]
    through = ranks2.run(train, work, 0, 6, None, case_setup=meeting)
    saved = ranks2.run(train, work, 0, 3, None, case_setup=meeting)
    found = fresh2.run(train, work, 3, 6, saved, case_setup=meeting)
    for one, other in zip(found, through, strict=True):
        assert same(one.model, other.model)
        assert same(one.averager, other.averager)
    assert identical([each.model for each in through])
    # It is the saved state that does it: without it there are other bits.
    bare = [Saved(each.model, forgotten(each.averager)) for each in saved]
    found = fresh2.run(train, work, 3, 6, bare, case_setup=meeting)
    is_stateless = (work.codec, work.outer) == ("fp32", "average")
    assert same(found[0].model, through[0].model) is is_stateless


def forgotten(state: dict[str, Any]) -> dict[str, Any]:
    """A state of the same layout that holds nothing."""
    bare = copy.deepcopy(state)
    for group in bare["groups"]:
        group.update(momentum=None, base=None, residual=None)
    return bare


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize(("codec", "is_no_number"), [("int8", False), ("int4", True)])
def test_a_rank_that_is_left_out_keeps_its_residual(
    ranks3: RankPool, is_overlapped: bool, codec: str, is_no_number: bool
) -> None:
    """And sends it later. What it owns of the sum goes on to be its business."""
    work = Work(
        is_overlapped, codec, drains_at=0, left_out=(1, 2), is_no_number=is_no_number
    )
    saved = ranks3.run(train, work, 0, 3, None, case_setup=meeting)
    assert identical([each.model for each in saved])
    assert all(bool(value.isfinite().all()) for value in saved[0].model.values())
    own = slice(saved[2].own.start, saved[2].own.stop)
    first, second, third = saved[2].residuals
    assert bool(torch.stack(saved[2].residuals).isfinite().all())
    assert not torch.equal(second[own], first[own])
    for residual in saved[2].residuals:
        residual[own] = 0.0
    assert float(first.abs().max()) > 0
    assert torch.equal(second, first)
    assert not torch.equal(third, second)
    others = saved[0].residuals
    assert not torch.equal(others[1], others[0])


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_rank_that_joins_goes_on_from_another_ones_state(
    ranks2: RankPool, ranks3: RankPool, is_overlapped: bool
) -> None:
    """It has no residual of its own; what the others had left out comes with theirs."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, work in (
        ("exact", Work(is_overlapped, outer="slowmo")),
        ("coded", Work(is_overlapped, "int8", outer="slowmo")),
        ("alone", Work(is_overlapped, outer="slowmo")),
    ):
        saved = ranks2.run(train, work, 0, 3, None, case_setup=meeting)
        comes = copy.deepcopy(saved[0])
        for group in comes.averager["groups"]:
            group["residual"] = None
            if name == "alone":
                group["momentum"] = None
        if name == "alone":
            saved = [Saved(each.model, comes.averager) for each in saved]
        found = ranks3.run(train, work, 3, 6, [*saved, comes], case_setup=meeting)
        assert identical([each.model for each in found])
        states[name] = found[0].model
    apart = difference(states["coded"], states["exact"])
    assert 0.0 < apart < 0.02
    assert difference(states["alone"], states["exact"]) > 2 * apart


@pytest.mark.faults
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_survivors_keep_what_encoding_left_out(
    ranks3: RankPool, is_overlapped: bool
) -> None:
    coded, exact = (
        ranks3.run(
            lose_a_rank, Work(is_overlapped, codec, "average"), case_setup=meeting
        )[:2]
        for codec in ("int8", "fp32")
    )
    assert identical([each.model for each in coded])
    assert identical([each.model for each in exact])
    assert 0.0 < difference(coded[0].model, exact[0].model) < 0.02
    for survivor in coded:
        (before,), (after,) = survivor.left_out, survivor.carried
        assert bool(before.any())
        assert torch.equal(before, after)


def test_states_that_do_not_belong_together_are_refused(ranks2: RankPool) -> None:
    work = Work()
    numel = sum(p.numel() for p in build(work).parameters())
    group = {"dtype": "float32", "numel": numel, "base": None, "residual": None}
    state: dict[str, Any] = {
        "version": 1,
        "groups": [{**group, "momentum": torch.ones(numel)}],
    }

    def told(**changes: Any) -> list[list[str]]:
        other = {"version": 1, "groups": [{**state["groups"][0], **changes}]}
        return ranks2.run(load_others, work, [state, other], case_setup=meeting)

    assert told() == [["", "loaded"]] * 2
    refused = {
        "rank 1 loads another outer momentum": {"momentum": torch.zeros(numel)},
        "rank 1 cannot load its state: expected 1447 elements of float32, got 5": {
            "numel": 5
        },
        "expected a momentum of 1447 elements of float32, got list": {"momentum": [1]},
        "expected a base of 1447 elements of float32, got [3] of float32": {
            "base": torch.ones(3)
        },
        "expected a residual of 1447 elements of float32, got dict": {
            "residual": {"own": (0, 0)}
        },
    }
    for says, changes in refused.items():
        for error, holds in told(**changes):
            assert says in error
            assert holds == "none"
