"""Ranks that join the steps of ``sync``: all train on as one process would have."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases.step_deaths import BATCH
from tests.distributed.cases.step_joins import (
    StepGrowing,
    StepGrown,
    grow,
    reference,
    steps_in,
)
from tests.distributed.cases.survive_cases import Death
from tests.distributed.cases.tasks import identical
from tests.distributed.test_step_deaths import GLOO
from tests.harness.fenced import run_fenced

pytestmark = pytest.mark.distributed

EACH_WAY = pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])


def trained(plan: StepGrowing, *, fails: tuple[int, ...] = ()) -> list[StepGrown]:
    """Checks what those who are there at the end have."""
    outcomes, lost = run_fenced(
        plan.founders + plan.joiners, grow, plan, joiners=plan.joiners
    )
    victims = [death.rank for death in plan.deaths]
    errors = {each.rank: each.error for each in outcomes if each.error}
    others = [error for rank, error in errors.items() if rank not in (*victims, *fails)]
    assert not others, "\n".join(map(str, others))
    assert {*errors} == {*victims, *fails}, "a fault did not happen"
    assert {*lost} <= {*errors}
    ended: list[StepGrown] = [
        each.value for each in outcomes if each.rank not in errors
    ]
    first = ended[0]
    assert identical([each.state for each in ended])
    assert identical([each.copy for each in ended])
    assert [each.place for each in ended] == list(range(len(ended)))
    assert {each.world_size for each in ended} == {len(ended)}
    assert {each.metrics for each in ended} == {plan.samples}
    expected = float(plan.samples * first.epochs)
    assert {(e.progress, e.epochs) for e in ended} == {(expected, first.epochs)}
    if plan.accumulate == 1 and not plan.freezes:
        check_reference(plan, first, [*victims, *fails])
    return ended


def check_reference(plan: StepGrowing, first: StepGrown, victims: list[int]) -> None:
    """One process that takes the same steps ends with the same model."""
    epochs = steps_in(plan, first.epochs, victims)
    for steps in epochs:
        counts = Counter(index for step in steps.values() for index in step)
        assert counts == dict.fromkeys(range(plan.samples), 1)
    sizes = [[len(step) for step in steps.values()] for steps in epochs]
    rest = plan.samples % BATCH
    whole = [*[BATCH] * (plan.samples // BATCH), *[rest] * bool(rest)]
    if not any(death.rank < plan.founders for death in plan.deaths):
        changed = [each for each in sizes if each != whole]
        assert len(changed) <= len(plan.deaths), sizes
    state, copy, rate = reference(plan, epochs)
    for found, wanted in ((first.state, state), (first.copy, copy)):
        for name, value in wanted.items():
            if not name.endswith("trace"):  # which each rank writes on its own batches
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    assert first.rate == pytest.approx(rate)


def check_newcomers(plan: StepGrowing, ended: list[StepGrown]) -> None:
    """All of them are there."""
    assert len(ended) == plan.founders + plan.joiners - len(plan.deaths)


def test_a_rank_joins_steps(tmp_path: Path) -> None:
    plan = StepGrowing(folder=str(tmp_path))
    check_newcomers(plan, trained(plan))


@pytest.mark.parametrize("loss", ["sum", "weighted"])
def test_a_rank_joins_steps_of_other_losses(loss: str, tmp_path: Path) -> None:
    """In the middle of an epoch, and not only at its beginning."""
    plan = StepGrowing(folder=str(tmp_path), loss=loss, samples=480, step_s=0.02)
    check_newcomers(plan, trained(plan))


def test_a_rank_joins_in_place_of_one_that_died(tmp_path: Path) -> None:
    """The rest of that epoch is shared out anew, and again with the newcomer."""
    plan = StepGrowing(
        folder=str(tmp_path), founders=3, deaths=(Death(1, "forward", 4),)
    )
    check_newcomers(plan, trained(plan))


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH_WAY
def test_a_newcomer_dies_at_every_place(
    options: dict[str, Any], tmp_path: Path
) -> None:
    places = {name: 1 for name in ("ready", "handing", "handed", "forming")}
    places |= {"building": 1, "built": 1, "formed": 1, "opening": 1}
    places |= {"load": 3, "forward": 1, "backward": 1, "closed": 2, "step": 3}
    for place, at in places.items():
        (folder := tmp_path / place).mkdir()
        print(options, place)
        deaths = (Death(2, place, at),)
        plan = StepGrowing(
            folder=str(folder), deaths=deaths, options=(*options.items(),)
        )
        check_newcomers(plan, trained(plan))


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH_WAY
def test_a_member_dies_while_another_joins(
    options: dict[str, Any], tmp_path: Path
) -> None:
    for rank, place in (
        *((0, "handing"), (1, "handing"), (1, "handed"), (1, "forming")),
        *((0, "building"), (1, "built"), (0, "formed")),
    ):
        (folder := tmp_path / f"{place}{rank}").mkdir()
        print(options, place, rank)
        plan = StepGrowing(
            folder=str(folder),
            founders=3,
            called_at=3,
            deaths=(Death(rank, place, 1),),
            options=(*options.items(),),
        )
        check_newcomers(plan, trained(plan))


@pytest.mark.slow
def test_all_take_part_again_where_a_rank_was_left_out(tmp_path: Path) -> None:
    plan = StepGrowing(
        folder=str(tmp_path),
        samples=480,
        slow=30.0,
        called_after=200,
        options=(("leave_out", True), ("epochs", 200)),
    )
    check_newcomers(plan, trained(plan))
    fast, slow = (len((tmp_path / f"log{r}.txt").read_text().split("\n")) for r in "01")
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
    plan = StepGrowing(folder=str(tmp_path), **fault)
    assert len(trained(plan, fails=(2,))) == 2
    assert says in plan.sign(2).read_text()
