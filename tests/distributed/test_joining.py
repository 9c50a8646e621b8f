"""Ranks that join a run under way: every position once, and all ranks equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elche.checkpoint.store import CheckpointStore
from tests.distributed.cases.counting import rows_of
from tests.distributed.cases.deaths import Death
from tests.distributed.cases.joining_cases import Growing
from tests.distributed.cases.step_deaths import BATCH
from tests.distributed.grown import ended
from tests.distributed.test_step_deaths import GLOO
from tests.harness.choices import ALONE, STEPS, WINDOWS
from tests.harness.choices import wanted as wanted

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
EACH_WAY = pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.every(2)
def test_a_rank_joins_inside_an_epoch(policy: str, tmp_path: Path) -> None:
    ended(Growing(folder=str(tmp_path), policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_rank_joins_over_gloo(policy: str, codec: str, tmp_path: Path) -> None:
    options = ("codec", codec), *GLOO.items()
    ended(Growing(folder=str(tmp_path), policy=policy, options=options))


def test_a_rank_joins_with_a_codec_one_that_was_left_alone(tmp_path: Path) -> None:
    """Whose messages were not encoded meanwhile."""
    growth = Growing(
        folder=str(tmp_path),
        policy="async",
        deaths=(Death(1, "batch", 6),),
        called_at=1,
        options=(("codec", "int8"),),
    )
    ended(growth)


@pytest.mark.parametrize(
    ("policy", "founders", "joiners", "victim"),
    [
        ("cadence", 3, 1, 1),
        pytest.param("async", 3, 1, 0, marks=SLOW),
        pytest.param("cadence", 2, 2, 1, marks=SLOW),
    ],
)
def test_ranks_join_in_place_of_one_that_died(
    policy: str, founders: int, joiners: int, victim: int, tmp_path: Path
) -> None:
    growth = Growing(
        folder=str(tmp_path),
        policy=policy,
        founders=founders,
        joiners=joiners,
        deaths=(Death(victim, "batch", 6),),
        called_at=founders - 1,
    )
    ended(growth)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_the_rank_that_hands_over_dies(policy: str, tmp_path: Path) -> None:
    """The next one does; it is the first now, in the order of samples as well."""
    deaths = (Death(0, "handing", 1),)
    ended(Growing(folder=str(tmp_path), policy=policy, founders=3, deaths=deaths))


@pytest.mark.slow
def test_a_rank_joins_where_checkpoints_are_made(tmp_path: Path) -> None:
    growth = Growing(folder=str(tmp_path), policy="async", saves=True, enough=70)
    first, *_ = ended(growth)  # with all of them for more than an epoch
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.name == f"checkpoint-{first.epochs:08d}"
    assert newest.manifest.world_size == 3


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("before ready", marks=SLOW),
        pytest.param("after ready", marks=SLOW),
        pytest.param("regrouping", marks=SLOW),
        "regrouped",
        pytest.param("handed", marks=SLOW),
        pytest.param("before opened", marks=SLOW),
    ],
)
def test_who_dies_joining_does_not_end_the_run(place: str, tmp_path: Path) -> None:
    deaths = (Death(2, place, 1),)
    ended(Growing(folder=str(tmp_path), policy="cadence", deaths=deaths))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("lr", "configuration differs between ranks"),
        pytest.param("model", "the model differs", marks=SLOW),
        pytest.param("loop", "elche.epochs(number)", marks=SLOW),
        pytest.param("", "a fault in the joiner's script", marks=SLOW),
    ],
)
def test_who_runs_another_script_ends_by_name_and_alone(
    other: str, says: str, tmp_path: Path
) -> None:
    growth = Growing(
        folder=str(tmp_path), policy="cadence", other=other, raises=not other
    )
    assert len(ended(growth, 2)) == 2
    assert says in growth.sign(2).read_text()


def growing(folder: Path, *deaths: Death, **more: Any) -> Growing:
    """Of steps; those of an epoch take some hundredths of a second."""
    usual: dict[str, Any] = {"samples": 94, "batch": BATCH, "step_s": 0.004}
    options = (*more.pop("options", {}).items(),)
    more = {**usual, **more, "deaths": deaths, "options": options}
    return Growing(folder=str(folder), **more)


def test_a_rank_joins_steps(tmp_path: Path) -> None:
    ended(growing(tmp_path))


@pytest.mark.parametrize("loss", ["sum", "weighted"])
@pytest.mark.every(2)
def test_a_rank_joins_steps_of_other_losses(loss: str, tmp_path: Path) -> None:
    """In the middle of an epoch, and not only at its beginning."""
    ended(growing(tmp_path, loss=loss, samples=480, step_s=0.02))


def test_a_rank_joins_steps_in_place_of_one_that_died(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("choices", "called_in"),
    [((STEPS,), "sync"), ((WINDOWS,), "async")],
    ids=["steps", "windows"],
)
@pytest.mark.every(2)
def test_a_rank_joins_under_auto(
    choices: tuple[tuple[str, tuple[int, ...]], ...],
    called_in: str,
    wanted: Callable[..., None],
    tmp_path: Path,
) -> None:
    wanted(*choices)
    growth = Growing(folder=str(tmp_path), policy="auto", called_in=called_in)
    assert ended(growth)[-1].policies == [called_in]


def test_a_rank_joins_where_one_trains_alone(
    wanted: Callable[..., None], tmp_path: Path
) -> None:
    """Which is not the first one; all go back to steps with its optimizer's state."""
    wanted(ALONE, STEPS)
    growth = Growing(folder=str(tmp_path), policy="auto", called_in="async")
    _, second, newcomer = ended(growth)
    assert newcomer.policies == ["sync"]
    assert second.policies == ["sync", "async", "sync"]


@pytest.mark.slow
@EACH_WAY
@pytest.mark.parametrize("called_in", ["sync", "async"])
@pytest.mark.parametrize("victim", [0, 2])
def test_ranks_join_under_auto_in_place_of_one_that_died(
    victim: int,
    called_in: str,
    options: dict[str, Any],
    wanted: Callable[..., None],
    tmp_path: Path,
) -> None:
    wanted(STEPS if called_in == "sync" else WINDOWS)
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
