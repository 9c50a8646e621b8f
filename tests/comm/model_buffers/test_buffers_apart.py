"""Ranks whose buffers have grown apart, where messages are laid out anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elche.coordination.auto import first_choice
from tests.comm.model_buffers.cases.buffer_cases import Script, Seen, train
from tests.distributed.cases.tasks import identical
from tests.harness.choices import want
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
WINDOWS = ("cadence", "async")
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


def check(found: list[Seen], script: Script) -> None:
    """All went well: what is not a rank's own is equal, and was averaged."""
    own = {"appears": "late", "appear in another order": "late_b", "is wider": ""}.get(
        script.change, "cache"
    )
    for seen in found:
        told = [f"buffers {own}: each rank keeps its own"] if own else []
        assert seen.said == told
    assert [seen.error for seen in found] == [""] * len(found)
    same = [{n: v.float() for n, v in seen.state.items()} for seen in found]
    assert identical(same)
    for name in {"last.running_mean", "level"} & same[0].keys():
        assert bool(same[0][name].any())


@pytest.mark.parametrize(("policy", "change", "rank"), crossed(WINDOWS))
@pytest.mark.every(2)
def test_windows_take_over(
    ranks2: RankPool,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    change: str,
    rank: int,
) -> None:
    want(monkeypatch, (policy, ()))
    monkeypatch.setattr(first_choice, "MOST_STEPS", 1)
    script = Script(change, rank, {"policy": "auto", "max_anchor": 4}, samples=240)
    found = ranks2.run(train, script, case_setup=serve_in_thread)
    check(found, script)
    assert all(seen.policies == ["sync", policy] for seen in found)


@pytest.mark.parametrize(("options", "change", "rank"), crossed(EVERY))
@pytest.mark.every(3)
def test_a_layer_is_unfrozen(
    ranks2: RankPool, options: dict[str, Any], change: str, rank: int
) -> None:
    script = Script(change, rank, options, unfreezes=True)
    found = ranks2.run(train, script, case_setup=serve_in_thread)
    check(found, script)
