"""Ranks whose buffers have grown apart, where messages are laid out anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.comm.model_buffers.cases.buffer_cases import Seen, train
from tests.distributed.cases.tasks import identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed

CHANGES = (
    ("grows", 0),
    ("appears", 0),
    ("appears", 1),
    ("appear in another order", 0),
    ("vanishes", 0),
    ("vanishes", 1),
    ("is wider", 0),
    ("is of another kind", 1),
)
EVERY: tuple[dict[str, Any], ...] = (
    {"policy": "sync"},
    {"policy": "cadence", "max_anchor": 2},
    {"policy": "cadence", "update": "gradients", "max_anchor": 2},
    {"policy": "async", "max_anchor": 2},
)


def crossed(others: Sequence[Any]) -> list[Any]:
    """A cache that grows with each of some settings, other changes with one."""
    return [
        pytest.param(*(other, *change), id=f"{change[0]}-{change[1]}-{other}")
        for number, change in enumerate(CHANGES)
        for at, other in enumerate(others)
        if at == number % len(others) or change[0] == "grows"
    ]


def check(found: list[Seen], change: str) -> None:
    """All went well: what is not a rank's own is equal, and was averaged."""
    names = {"appears": "late", "appear in another order": "late_b", "is wider": ""}
    own = names.get(change, "cache")
    for seen in found:
        told = [f"buffers {own}: each rank keeps its own"] if own else []
        assert seen.said == told
    assert [seen.error for seen in found] == [""] * len(found)
    same = [{n: v.float() for n, v in seen.state.items()} for seen in found]
    assert identical(same)
    for name in {"last.running_mean", "level"} & same[0].keys():
        assert bool(same[0][name].any())


@pytest.mark.parametrize(("options", "change", "rank"), crossed(EVERY))
@pytest.mark.every(3)
def test_a_layer_is_unfrozen(
    ranks2: RankPool, options: dict[str, Any], change: str, rank: int
) -> None:
    given = change, rank, options
    check(ranks2.run(train, *given, case_setup=serve_in_thread), change)
