"""Ranks that join the steps of ``sync``: all train on as one process would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases.counting import rows_of
from tests.distributed.cases.deaths import Death
from tests.distributed.cases.joining_cases import Growing
from tests.distributed.cases.step_deaths import BATCH
from tests.distributed.grown import ended
from tests.distributed.test_step_deaths import GLOO

pytestmark = pytest.mark.distributed

EACH_WAY = pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])


def growing(folder: Path, *deaths: Death, **more: Any) -> Growing:
    """Of steps; those of an epoch take some hundredths of a second."""
    usual: dict[str, Any] = {"samples": 94, "batch": BATCH, "step_s": 0.004}
    options = (*more.pop("options", {}).items(),)
    more = {**usual, **more, "deaths": deaths, "options": options}
    return Growing(folder=str(folder), **more)


def test_a_rank_joins_steps(tmp_path: Path) -> None:
    ended(growing(tmp_path))


@pytest.mark.parametrize("loss", ["sum", "weighted"])
def test_a_rank_joins_steps_of_other_losses(loss: str, tmp_path: Path) -> None:
    """In the middle of an epoch, and not only at its beginning."""
    ended(growing(tmp_path, loss=loss, samples=480, step_s=0.02))


def test_a_rank_joins_in_place_of_one_that_died(tmp_path: Path) -> None:
    """The rest of that epoch is shared out anew, and again with the newcomer."""
    ended(growing(tmp_path, Death(1, "forward", 4), founders=3, called_at=2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH_WAY
def test_a_newcomer_dies_at_every_place(
    options: dict[str, Any], tmp_path: Path
) -> None:
    places = dict.fromkeys(("after ready", "handing", "handed", "regrouping"), 1)
    places |= {"beginning anew": 1, "begun anew": 1, "formed": 1, "before opened": 1}
    places |= {"load": 3, "forward": 1, "backward": 1, "closed": 2, "step": 3}
    for place, at in places.items():
        (folder := tmp_path / place).mkdir()
        print(options, place)
        ended(growing(folder, Death(2, place, at), options=options))


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH_WAY
def test_a_member_dies_while_another_joins(
    options: dict[str, Any], tmp_path: Path
) -> None:
    for rank, place in (
        *((0, "handing"), (1, "handing"), (1, "handed"), (1, "regrouping")),
        *((0, "beginning anew"), (1, "begun anew"), (0, "formed")),
    ):
        (folder := tmp_path / f"{place}{rank}").mkdir()
        print(options, place, rank)
        ended(growing(folder, Death(rank, place, 1), founders=3, options=options))


@pytest.mark.slow
def test_all_take_part_again_where_a_rank_was_left_out(tmp_path: Path) -> None:
    options = {"leave_out": True, "epochs": 200}
    more = {"samples": 480, "slow": 30.0, "called_after": 200}
    ended(growing(tmp_path, options=options, **more))
    fast, slow = (len(rows_of(tmp_path, rank)) for rank in (0, 1))
    assert slow < fast, "it was not left out"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"accumulate": 2}, "not followed by a step of every optimizer"),
        (
            {"early": True, "samples": 480, "step_s": 0.03},
            "the next batch is asked for before the backward pass",
        ),
        pytest.param(
            {"freezes": True}, "would train other parameters", marks=pytest.mark.slow
        ),
        pytest.param({"raises": True}, "a fault in the", marks=pytest.mark.slow),
    ],
    ids=["accumulates", "early", "freezes", "raises"],
)
def test_who_cannot_join_ends_by_name_and_alone(
    fault: dict[str, Any], says: str, tmp_path: Path
) -> None:
    growth = growing(tmp_path, **fault)
    assert len(ended(growth, 2)) == 2
    assert says in growth.sign(2).read_text()
