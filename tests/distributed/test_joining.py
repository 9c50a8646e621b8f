"""Ranks that join a run under way: every position once, and all ranks equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elche.checkpoint.store import CheckpointStore
from tests.distributed.cases.joining_cases import Joined, Plan, grow
from tests.distributed.cases.survive_cases import handed
from tests.distributed.cases.tasks import identical
from tests.distributed.test_survive import GLOO
from tests.harness.fenced import run_fenced
from tests.harness.rank_process import Outcome

pytestmark = pytest.mark.distributed


def run(plan: Plan, joiners: int = 1) -> list[Outcome]:
    """The run; how its ranks ended."""
    return run_fenced(plan.founders + joiners, grow, plan, joiners=joiners)[0]


def check_all(outcomes: list[Outcome], plan: Plan, gone: set[int]) -> list[Joined]:
    """Those who are there at the end: equal, and with each position once."""
    errors = {each.rank: each.error for each in outcomes if each.error}
    assert errors.keys() == gone, "\n".join(map(str, errors.values()))
    ended: list[Joined] = [each.value for each in outcomes if each.rank not in gone]
    assert identical([each.state for each in ended])
    assert identical([each.copy for each in ended])
    assert ended[0].state["count"].tolist() == [plan.epochs] * plan.samples
    assert {each.progress for each in ended} == {float(plan.samples * plan.epochs)}
    steps = plan.samples * plan.epochs // 16
    assert len({each.rate for each in ended}) == 1
    assert ended[0].rate == pytest.approx(0.9 ** (steps // 15))
    assert [each.ranks[1] for each in ended] == list(range(len(ended)))
    assert {each.ranks[2] for each in ended} == {len(ended)}
    counted = handed(Path(plan.folder))
    assert len(counted) == plan.samples * plan.epochs
    if plan.death < 0 and plan.giver < 0:
        assert set(counted.values()) == {1}, "handed out twice, and nobody died"
    return ended


def check_joined(ended: list[Joined], plan: Plan) -> None:
    """The newcomer took over what the first rank held, and trained."""
    new = ended[-1]
    assert new.ranks[0] >= plan.founders
    assert new.batches > 0
    assert new.handed  # its own first, and those of who joined after it
    assert new.handed == ended[0].handed[-len(new.handed) :]
    print(
        "longest time between two batches of an epoch:", [each.held_s for each in ended]
    )


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_rank_joins_inside_an_epoch(policy: str, tmp_path: Path) -> None:
    plan = Plan(folder=str(tmp_path), policy=policy, founders=2)
    check_joined(check_all(run(plan), plan, set()), plan)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_rank_joins_over_gloo(policy: str, codec: str, tmp_path: Path) -> None:
    options = {"codec": codec, **GLOO}
    plan = Plan(folder=str(tmp_path), policy=policy, founders=2, options=options)
    check_joined(check_all(run(plan), plan, set()), plan)


def test_a_rank_joins_with_a_codec_one_that_was_left_alone(tmp_path: Path) -> None:
    """Whose messages were not encoded meanwhile."""
    more: dict[str, Any] = {"death": 1, "options": {"codec": "int8"}}
    plan = Plan(folder=str(tmp_path), policy="async", founders=2, **more)
    check_joined(check_all(run(plan), plan, {1}), plan)


@pytest.mark.parametrize(
    ("policy", "death"),
    [("cadence", 1), pytest.param("async", 0, marks=pytest.mark.slow)],
)
def test_a_rank_joins_in_place_of_one_that_died(
    policy: str, death: int, tmp_path: Path
) -> None:
    plan = Plan(folder=str(tmp_path), policy=policy, founders=3, death=death)
    check_joined(check_all(run(plan), plan, {death}), plan)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_the_rank_that_hands_over_dies(policy: str, tmp_path: Path) -> None:
    """The next one does; it is the first now, in the order of samples as well."""
    plan = Plan(folder=str(tmp_path), policy=policy, founders=3, giver=0)
    check_joined(check_all(run(plan), plan, {0}), plan)


@pytest.mark.slow
def test_a_rank_joins_where_checkpoints_are_made(tmp_path: Path) -> None:
    plan = Plan(folder=str(tmp_path), policy="async", founders=2, saves=True)
    check_joined(check_all(run(plan), plan, set()), plan)
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert (newest.name, newest.manifest.world_size) == ("checkpoint-00000003", 3)


@pytest.mark.slow
def test_two_ranks_join_one_that_was_alone(tmp_path: Path) -> None:
    plan = Plan(folder=str(tmp_path), policy="cadence", founders=2, death=1)
    ended = check_all(run(plan, joiners=2), plan, {1})
    check_joined(ended, plan)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("before ready", marks=pytest.mark.slow),
        pytest.param("after ready", marks=pytest.mark.slow),
        pytest.param("regrouping", marks=pytest.mark.slow),
        "regrouped",
        pytest.param("handed", marks=pytest.mark.slow),
        pytest.param("before opened", marks=pytest.mark.slow),
        pytest.param("raises", marks=pytest.mark.slow),
    ],
)
def test_who_fails_to_join_does_not_end_the_run(place: str, tmp_path: Path) -> None:
    plan = Plan(folder=str(tmp_path), policy="cadence", founders=2, fails=place)
    outcomes = run(plan)
    check_all(outcomes, plan, {2})
    error = outcomes[2].error
    assert error is not None
    if place == "raises":
        assert "a fault in the joiner's script" in str(error) or error.way == "died"
    else:
        assert error.way == "died"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("lr", "configuration differs between ranks"),
        pytest.param("model", "the model differs", marks=pytest.mark.slow),
        pytest.param("loop", "elche.epochs(number)", marks=pytest.mark.slow),
    ],
)
def test_who_runs_another_script_is_refused_by_name(
    other: str, says: str, tmp_path: Path
) -> None:
    plan = Plan(folder=str(tmp_path), policy="cadence", founders=2, other=other)
    outcomes = run(plan)
    check_all(outcomes, plan, {2})
    assert says in str(outcomes[2].error)
