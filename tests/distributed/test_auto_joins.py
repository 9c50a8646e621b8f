"""Ranks that join under ``auto``: in steps, in windows, and on the way between them."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases.auto_deaths import SAMPLES
from tests.distributed.cases.auto_joins import AutoGrowing, AutoGrown, grow
from tests.distributed.cases.survive_cases import Death
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
    handed: Counter[tuple[int, int]] = Counter()
    for path in Path(growth.folder).glob("log*.txt"):
        for line in path.read_text().splitlines():
            epoch, *indices = map(int, line.split())
            handed.update((epoch, index) for index in indices)
    assert len(handed) == SAMPLES * first.epochs
    assert growth.deaths or set(handed.values()) == {1}
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
def test_a_rank_joins_while_steps_are_measured(
    wanted: type[Wanted], tmp_path: Path
) -> None:
    wanted.steps = 60
    growth = AutoGrowing(folder=str(tmp_path), called_after=1)
    ended = trained(growth)
    check_newcomers(growth, ended)
    assert all(each.policies == ["sync"] for each in ended)


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


@pytest.mark.slow
@pytest.mark.parametrize("called_in", ["sync", "async"])
def test_one_that_was_left_alone_is_joined(
    called_in: str, wanted: type[Wanted], tmp_path: Path
) -> None:
    wanted.choices = (STEPS,) if called_in == "sync" else (WINDOWS,)
    growth = AutoGrowing(
        folder=str(tmp_path),
        deaths=(Death(1, "batch", 12),),
        called_in=called_in,
        called_at=1,
    )
    check_newcomers(growth, trained(growth))


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH_WAY
def test_deaths_while_a_rank_joins_windows(
    options: dict[str, Any], wanted: type[Wanted], tmp_path: Path
) -> None:
    """Of the newcomer, of the rank that hands over, and of another one."""
    wanted.choices = (WINDOWS,)
    for rank, place in (
        *((3, place) for place in ("ready", "handing", "handed", "opening")),
        *((3, "batch"), (0, "handing"), (1, "handing"), (1, "handed")),
    ):
        (folder := tmp_path / f"{place}{rank}").mkdir()
        print(options, rank, place)
        growth = AutoGrowing(
            folder=str(folder),
            founders=3,
            deaths=(Death(rank, place, 3 if place == "batch" else 1),),
            called_in="async",
            options=(*options.items(),),
        )
        assert len(trained(growth)) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH_WAY
def test_joins_and_deaths_at_random_moments(
    options: dict[str, Any], wanted: type[Wanted], tmp_path: Path
) -> None:
    draws = random.Random(repr(options))
    for number in range(12):
        (folder := tmp_path / str(number)).mkdir()
        wanted.steps = draws.randrange(1, 12)
        wanted.choices = draws.choice([(STEPS,), (WINDOWS,)])
        victims = draws.sample(range(5), draws.choice((0, 1, 2)))
        growth = AutoGrowing(
            folder=str(folder),
            founders=3,
            joiners=2,
            deaths=tuple(
                Death(r, "batch", draws.randrange(2, 16 if r < 3 else 5))
                for r in victims
            ),
            called_at=draws.choice((2, 3)) if min(victims, default=3) < 3 else 3,
            called_after=draws.randrange(1, 16),
            options=(*options.items(),),
        )
        print(wanted.choices, wanted.steps, growth)
        trained(growth)
