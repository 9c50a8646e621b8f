"""Ranks that join under ``auto``: in steps, in windows, and on the way between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases.deaths import Death
from tests.distributed.cases.joining_cases import Growing
from tests.distributed.grown import ended
from tests.distributed.test_auto_deaths import ALONE, GLOO, STEPS, WINDOWS, Wanted
from tests.distributed.test_auto_deaths import wanted as wanted

pytestmark = pytest.mark.distributed

EACH_WAY = pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])


@pytest.mark.parametrize(
    ("choices", "called_in"),
    [((STEPS,), "sync"), ((WINDOWS,), "async")],
    ids=["steps", "windows"],
)
def test_a_rank_joins(
    choices: tuple[str, ...], called_in: str, wanted: type[Wanted], tmp_path: Path
) -> None:
    wanted.choices = choices
    growth = Growing(folder=str(tmp_path), policy="auto", called_in=called_in)
    assert ended(growth)[-1].policies == [called_in]


def test_a_rank_joins_where_one_trains_alone(
    wanted: type[Wanted], tmp_path: Path
) -> None:
    """Which is not the first one; all go back to steps with its optimizer's state."""
    wanted.choices = (ALONE, STEPS)
    growth = Growing(folder=str(tmp_path), policy="auto", called_in="async")
    _, second, newcomer = ended(growth)
    assert newcomer.policies == ["sync"]
    assert second.policies == ["sync", "async", "sync"]


@pytest.mark.slow
@EACH_WAY
@pytest.mark.parametrize("called_in", ["sync", "async"])
@pytest.mark.parametrize("victim", [0, 2])
def test_ranks_join_in_place_of_one_that_died(
    victim: int,
    called_in: str,
    options: dict[str, Any],
    wanted: type[Wanted],
    tmp_path: Path,
) -> None:
    wanted.choices = (STEPS,) if called_in == "sync" else (WINDOWS,)
    growth = Growing(
        folder=str(tmp_path),
        policy="auto",
        founders=3,
        joiners=2,
        deaths=(Death(victim, "batch", 12),),
        called_at=2,
        called_in=called_in,
        options=(*options.items(),),
    )
    ended(growth)
