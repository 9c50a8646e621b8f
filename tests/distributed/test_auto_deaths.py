"""Ranks that die under ``auto``: in steps, in windows, and on the way between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elche.coordination.auto import first_choice
from elche.coordination.sync import step_grants
from tests.distributed.cases.auto_deaths import (
    BUILDING,
    EPOCHS,
    SAMPLES,
    Counted,
    train,
)
from tests.distributed.cases.survive_cases import Death, handed
from tests.distributed.cases.tasks import identical
from tests.harness.choices import want
from tests.harness.fenced import run_fenced, survivors_of

pytestmark = pytest.mark.distributed

GLOO = {"transport": {"kind": "gloo"}}
WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "gloo": GLOO,
    "int8": {"codec": "int8"},
}
WINDOWS, ALONE, STEPS = ("async", ()), ("sync", (-1,)), ("sync", ())
MEASURED = 2


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Choices come as a test wants, after few measurements; else it is windows."""

    def is_due(first: Any, *_: Any) -> bool:
        return bool(first._measures.count >= MEASURED)

    want(monkeypatch, WINDOWS)
    monkeypatch.setattr(first_choice.FirstChoice, "is_due", is_due)
    monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)
    return partial(want, monkeypatch)


def outlive(
    tmp_path: Path, *deaths: Death, ranks: int = 4, **options: Any
) -> list[list[str]]:
    """A run in which ranks die; the policies of the others, whose account is checked.

    By what loops were handed, by what the model holds, and by elche.
    """
    outcomes, lost = run_fenced(ranks, train, str(tmp_path), deaths, options)
    victims = [death.rank for death in deaths]
    survivors: list[Counted] = survivors_of(outcomes, lost, victims)
    assert identical([each.state for each in survivors])
    state = survivors[0].state
    assert (state["count"] - state["w"]).tolist() == [EPOCHS] * SAMPLES
    assert {each.progress for each in survivors} == {float(SAMPLES * EPOCHS)}
    assert len(handed(tmp_path)) == SAMPLES * EPOCHS
    assert [each.place for each in survivors] == list(range(len(survivors)))
    assert {each.world_size for each in survivors} == {len(survivors)}
    return [each.policies for each in survivors]


@pytest.mark.parametrize(
    ("place", "at"), [("forward", 3), ("inside building", 1), ("after summing", 2)]
)
def test_a_death_is_outlived(place: str, at: int, tmp_path: Path) -> None:
    """While steps are measured, on the way to windows, and in them."""
    found = outlive(tmp_path, Death(2, place, at))
    assert found == [["sync", "async"]] * 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_deaths_on_the_way_to_windows(
    options: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    for rank, place in itertools.product((0, 1), BUILDING):
        (folder := tmp_path / f"{rank} {place}").mkdir()
        print(options, ranks, rank, place)
        found = outlive(folder, Death(rank, place, 1), ranks=ranks, **options)
        assert found == [["sync", "async"]] * (ranks - 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_work_dies(
    rank: int, wanted: Callable[..., None], tmp_path: Path
) -> None:
    """The one that trains alone goes on alone."""
    wanted(ALONE)
    found = outlive(tmp_path, Death(rank, "after reduced", 2), ranks=3)
    assert found[-1] == ["sync", "async"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "says"),
    [
        (("batch", 12), "trains alone, and no other has its optimizer's state"),
        (("before building", 2), "which trained alone, has died before the others had"),
    ],
)
def test_the_death_of_the_rank_that_trains_alone_ends_the_run_by_name(
    death: tuple[str, int], says: str, wanted: Callable[..., None], tmp_path: Path
) -> None:
    """What its optimizer holds has nobody else."""
    wanted(*[ALONE] if death[0] == "batch" else [ALONE, STEPS])
    outcomes, _ = run_fenced(3, train, str(tmp_path), (Death(2, *death),), {})
    assert says in str(outcomes[0].error)
    assert outcomes[1].error is not None
