"""Ranks that join under ``auto``: in steps, in windows, and on the way between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases.auto_deaths import SAMPLES
from tests.distributed.cases.auto_joins import AutoGrowing, AutoGrown, grow
from tests.distributed.cases.survive_cases import Death, handed
from tests.distributed.cases.tasks import identical
from tests.distributed.test_auto_deaths import ALONE, GLOO, STEPS, WINDOWS, Wanted
from tests.distributed.test_auto_deaths import wanted as wanted
from tests.harness.fenced import run_fenced

pytestmark = pytest.mark.distributed

EACH_WAY = pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])


def trained(growth: AutoGrowing) -> list[AutoGrown]:
    """What those have who are there at the end, by three accounts.

    By what loops were handed, by what the model holds, and by elche.
    """
    outcomes, lost = run_fenced(
        growth.founders + growth.joiners, grow, growth, joiners=growth.joiners
    )
    victims = {death.rank for death in growth.deaths}
    errors = {each.rank: each.error for each in outcomes if each.error}
    others = [error for rank, error in errors.items() if rank not in victims]
    assert not others, "\n".join(map(str, others))
    assert {*errors} == victims, "a fault did not happen"
    assert {*lost} <= victims
    ended: list[AutoGrown] = [
        each.value for each in outcomes if each.rank not in errors
    ]
    first = ended[0]
    assert identical([each.state for each in ended])
    assert identical([each.copy for each in ended])
    assert len({each.rate for each in ended}) == 1
    assert [each.place for each in ended] == list(range(len(ended)))
    assert {each.world_size for each in ended} == {len(ended)}
    counts = first.state["count"] - first.state["w"]
    assert counts.tolist() == [first.epochs] * SAMPLES
    expected = float(SAMPLES * first.epochs)
    assert {(each.progress, each.epochs) for each in ended} == {
        (expected, first.epochs)
    }
    counted = handed(Path(growth.folder))
    assert len(counted) == SAMPLES * first.epochs
    assert growth.deaths or set(counted.values()) == {1}
    return ended


def check_newcomers(growth: AutoGrowing, ended: list[AutoGrown]) -> None:
    """All of them are there, and have trained."""
    assert len(ended) == growth.founders + growth.joiners - len(growth.deaths)
    living = growth.joiners - len(
        {death.rank for death in growth.deaths} & {*growth.newcomers}
    )
    assert all(each.batches for each in ended[len(ended) - living :])


@pytest.mark.parametrize(
    ("choices", "called_in"),
    [((STEPS,), "sync"), ((WINDOWS,), "async")],
    ids=["steps", "windows"],
)
def test_a_rank_joins(
    choices: tuple[str, ...],
    called_in: str,
    wanted: type[Wanted],
    tmp_path: Path,
) -> None:
    wanted.choices = choices
    growth = AutoGrowing(folder=str(tmp_path), called_in=called_in)
    ended = trained(growth)
    check_newcomers(growth, ended)
    assert ended[-1].policies == [called_in]


def test_a_rank_joins_where_one_trains_alone(
    wanted: type[Wanted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is not the first one; all go back to steps with its optimizer's state."""
    wanted.choices = (ALONE, STEPS)
    growth = AutoGrowing(folder=str(tmp_path), called_in="async")
    ended = trained(growth)
    check_newcomers(growth, ended)
    assert ended[-1].policies == ["sync"]
    assert ended[1].policies == ["sync", "async", "sync"]


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
    growth = AutoGrowing(
        folder=str(tmp_path),
        founders=3,
        joiners=2,
        deaths=(Death(victim, "batch", 12),),
        called_at=2,
        called_in=called_in,
        options=(*options.items(),),
    )
    check_newcomers(growth, trained(growth))
