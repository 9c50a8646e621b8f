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
from tests.distributed.test_step_deaths import GLOO, SHARED_OR_GLOO
from tests.harness.choices import ALONE, STEPS, WINDOWS
from tests.harness.choices import wanted as wanted

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow


LONG: dict[str, Any] = {"samples": 480, "step_s": 0.02}
Case = tuple[tuple[Death, ...], dict[str, Any]]
JOINS: list[Case] = [
    ((), {"policy": "cadence"}),
    # One that was left alone, whose messages were not encoded meanwhile.
    (
        (Death(1, "batch", 6),),
        {"policy": "async", "called_at": 1, "options": {"codec": "int8"}},
    ),
    ((Death(1, "batch", 6),), {"policy": "cadence", "founders": 3, "called_at": 2}),
    ((Death(2, "regrouped", 1),), {"policy": "cadence"}),
    ((), {}),
    # In the middle of an epoch, and not only at its beginning.
    ((), {**LONG, "loss": "sum"}),
    # The rest of that epoch is shared out anew, and again with the newcomer.
    ((Death(1, "forward", 4),), {"founders": 3, "called_at": 2}),
]
MORE_JOINS: list[Case] = [
    ((), {"policy": "async"}),
    ((), {**LONG, "loss": "weighted"}),
    ((Death(0, "batch", 6),), {"policy": "async", "founders": 3, "called_at": 2}),
    ((Death(1, "batch", 6),), {"policy": "cadence", "joiners": 2, "called_at": 1}),
    *(
        ((Death(2, place, 1),), {"policy": "cadence"})
        for place in ("before ready", "after ready", "regrouping", "handed")
    ),
    ((Death(2, "before opened", 1),), {"policy": "cadence"}),
    *(
        case
        for policy in ("cadence", "async")
        for case in (
            ((), {"policy": policy, "options": {"codec": "fp32", **GLOO}}),
            ((), {"policy": policy, "options": {"codec": "int4", **GLOO}}),
            # The next rank hands over; it is the first in the order of samples, too.
            ((Death(0, "handing", 1),), {"policy": policy, "founders": 3}),
        )
    ),
]


def growing(folder: Path, *deaths: Death, policy: str = "sync", **more: Any) -> Growing:
    """A run; steps of an epoch of ``sync`` take some hundredths of a second."""
    usual = {"samples": 94, "batch": BATCH, "step_s": 0.004} if policy == "sync" else {}
    options = (*more.pop("options", {}).items(),)
    more = {**usual, **more, "deaths": deaths, "options": options}
    return Growing(folder=str(folder), policy=policy, **more)


@pytest.mark.parametrize(
    ("deaths", "more"),
    [*JOINS, *(pytest.param(*case, marks=SLOW) for case in MORE_JOINS)],
    ids=str,
)
def test_a_rank_joins(
    deaths: tuple[Death, ...], more: dict[str, Any], tmp_path: Path
) -> None:
    """Inside an epoch; also in place of one that died, and where it dies itself."""
    ended(growing(tmp_path, *deaths, **more))


@pytest.mark.slow
def test_a_rank_joins_where_checkpoints_are_made(tmp_path: Path) -> None:
    growth = growing(tmp_path, policy="async", saves=True, enough=70)
    first, *_ = ended(growth)  # with all of them for more than an epoch
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.name == f"checkpoint-{first.epochs:08d}"
    assert newest.manifest.world_size == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@SHARED_OR_GLOO
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
@SHARED_OR_GLOO
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
        ({"policy": "cadence", "other": "lr"}, "configuration differs between ranks"),
        ({"accumulate": 2}, "not followed by a step of every optimizer"),
        (
            {**LONG, "early": True, "step_s": 0.03},
            "the next batch is asked for before the backward pass",
        ),
        *(
            pytest.param(fault, says, marks=SLOW)
            for fault, says in (
                ({"policy": "cadence", "other": "model"}, "the model differs"),
                ({"policy": "cadence", "other": "loop"}, "elche.epochs(number)"),
                ({"policy": "cadence", "raises": True}, "a fault in the joiner's"),
                ({"raises": True}, "a fault in the joiner's"),
                ({"freezes": True}, "would train other parameters"),
            )
        ),
    ],
    ids=str,
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
    growth = growing(tmp_path, policy="auto", called_in=called_in)
    assert ended(growth)[-1].policies == [called_in]


def test_a_rank_joins_where_one_trains_alone(
    wanted: Callable[..., None], tmp_path: Path
) -> None:
    """Which is not the first one; all go back to steps with its optimizer's state."""
    wanted(ALONE, STEPS)
    growth = growing(tmp_path, policy="auto", called_in="async")
    _, second, newcomer = ended(growth)
    assert newcomer.policies == ["sync"]
    assert second.policies == ["sync", "async", "sync"]


@pytest.mark.slow
@SHARED_OR_GLOO
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
    more = {"founders": 3, "joiners": 2, "called_at": 2, "called_in": called_in}
    death = Death(victim, "batch", 12)
    ended(growing(tmp_path, death, policy="auto", options=options, **more))
