"""Ranks that die under ``auto``: in steps, in windows, and on the way between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elche.coordination.auto import auto_chooser
from tests.distributed.cases.deaths import BUILDING, Death
from tests.distributed.test_survive import outlive, run_with
from tests.harness.choices import ALONE, STEPS
from tests.harness.choices import wanted as wanted

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("wanted")]

GLOO = {"transport": {"kind": "gloo"}}
WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "gloo": GLOO,
    "int8": {"codec": "int8"},
}
EPOCHS = 3


def outlived(
    tmp_path: Path, *deaths: Death, ranks: int = 4, **options: Any
) -> list[list[str]]:
    """A run in which ranks die; the policies of the others."""
    more = {"epochs": EPOCHS, "options": {"epochs": EPOCHS, **options}}
    return [e.policies for e in outlive(tmp_path, deaths, "auto", ranks, **more)]


@pytest.mark.parametrize(
    ("place", "at"), [("forward", 3), ("inside building", 1), ("after summing", 2)]
)
@pytest.mark.every(2)
def test_a_death_is_outlived(place: str, at: int, tmp_path: Path) -> None:
    """While steps are measured, on the way to windows, and in them."""
    found = outlived(tmp_path, Death(2, place, at))
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
        found = outlived(folder, Death(rank, place, 1), ranks=ranks, **options)
        assert found == [["sync", "async"]] * (ranks - 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_work_dies(
    rank: int, wanted: Callable[..., None], tmp_path: Path
) -> None:
    """The one that trains alone goes on alone."""
    wanted(ALONE)
    found = outlived(tmp_path, Death(rank, "after reduced", 2), ranks=3)
    assert found[-1] == ["sync", "async"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "says"),
    [
        (("batch", 12), "trains alone, and no other rank has its model"),
        (("before building", 2), "which trained alone, died before the others had"),
    ],
)
def test_the_death_of_the_rank_that_trains_alone_ends_the_run_by_name(
    death: tuple[str, int],
    says: str,
    wanted: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its optimizer holds has nobody else."""
    monkeypatch.setattr(auto_chooser, "RETURN_COST", math.inf)  # back in time
    wanted(*[ALONE] if death[0] == "batch" else [ALONE, STEPS])
    more = {"epochs": EPOCHS, "options": {"epochs": EPOCHS}}
    outcomes, _ = run_with(tmp_path, (Death(2, *death),), "auto", 3, **more)
    assert says in str(outcomes[0].error)
    assert outcomes[1].error is not None
