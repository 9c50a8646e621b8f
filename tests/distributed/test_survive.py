"""Ranks that die in windows: the others go on, and every sample counts once."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from elche.checkpoint.store import CheckpointStore
from elche.coordination import liveness
from elche.runtime.process import coordinator
from tests.distributed.cases.counting import BY_STEPS, counts_of, handed
from tests.distributed.cases.deaths import Death
from tests.distributed.cases.late_sums import HOLDS, REDUCTION, TRAINS, WAITS
from tests.distributed.cases.meetings import SIZE
from tests.distributed.cases.survive_cases import (
    Counted,
    Trial,
    hold_the_gil,
    pause,
    train,
)
from tests.distributed.cases.tasks import identical
from tests.harness.fenced import run_fenced, survivors_of
from tests.harness.rank_process import Outcome

pytestmark = pytest.mark.distributed

GLOO = {"transport": {"kind": "gloo"}}
HOSTS = [{"ELCHE_HOST": name} for name in "aabb"]
"""Sums are formed inside the hosts first."""
WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "gloo": {"options": GLOO},
    "hosts": {"env": HOSTS},
}
CODED: dict[str, dict[str, Any]] = {
    "int8": {"options": {"codec": "int8"}},
    "gloo int4": {"options": {"codec": "int4", **GLOO}},
}
"""Sums are formed in encoded form, by messages from rank to rank."""
WAYS_AND_CODECS = WAYS | CODED
PAUSE_S = 2.0
"""Well below the silence of which a rank is dead."""


def run_with(
    tmp_path: Path,
    deaths: tuple[Death, ...],
    policy: str,
    ranks: int = 4,
    env: Sequence[Mapping[str, str]] | None = None,
    **more: Any,
) -> tuple[list[Outcome], list[int]]:
    """A run in which ranks die; how each ended, and whom the others were to outlive."""
    trial = Trial(folder=str(tmp_path), policy=policy, deaths=deaths, **more)
    return run_fenced(ranks, train, trial, env=env)


def outlive(
    tmp_path: Path, deaths: tuple[Death, ...], policy: str, ranks: int = 4, **more: Any
) -> list[Counted]:
    """A run in which ranks die; what the others have at its end, checked.

    By the loops' logs, by the model's own counter, and by elche.
    """
    outcomes, lost = run_with(tmp_path, deaths, policy, ranks, **more)
    survivors: list[Counted] = survivors_of(outcomes, lost, [d.rank for d in deaths])
    samples, epochs = (more.get(n, getattr(Trial, n)) for n in ("samples", "epochs"))
    assert identical([each.state for each in survivors])
    assert counts_of(survivors[0].state, policy) == [epochs] * samples
    assert {each.progress for each in survivors} == {float(samples * epochs)}
    assert len(handed(tmp_path, ranks)) == samples * epochs
    if policy not in BY_STEPS:
        assert bool((survivors[0].state["w"] < 0).all()), "not each was stepped along"
    assert [each.place for each in survivors] == list(range(len(survivors)))
    assert {each.world_size for each in survivors} == {len(survivors)}
    return survivors


def outlive_each(
    tmp_path: Path,
    rank: int,
    places: Iterable[tuple[str, int]],
    policy: str,
    **more: Any,
) -> None:
    """Runs in which a rank dies, each at another place."""
    for place, at in places:
        (folder := tmp_path / f"{place} {at}").mkdir()
        print(rank, place, at, policy, more)
        outlive(folder, (Death(rank, place, at),), policy, **more)


PLACES = [
    "batch",
    "before closed",
    "after closed",
    "before sending",
    "after sending",
    "after summing",
    "before reduced",
    "after reduced",
]
BETWEEN = ["between", "before opened", "after opened", "keys", "after barrier"]


IN_A_SUM = 11
"""Of its parts that a rank of four sends, six for a sum: between two in the second
one's second half, so that one survivor has all of it, and the others not."""
ALIKE: dict[str, Any] = {"momentum": 0.5, "windows": {"update": "gradients"}}
"""Windows in which optimizers hold the same on all ranks."""
SLOW = pytest.mark.slow
Case = tuple[str, tuple[Death, ...], dict[str, Any]]
CASES: list[Case] = [
    ("cadence", (Death(2, "after closed"),), {}),
    ("async", (Death(2, "after summing"),), {}),
    ("cadence", (Death(2, "sending a part", IN_A_SUM),), CODED["int8"]),
    ("async", (Death(0, "after summing"),), CODED["gloo int4"]),
    # What is built anew is of those who live; once in the group with the dead rank.
    ("cadence", (Death(2, "batch"),), {"freezes": True}),
    ("cadence", (Death(2, "after finishing"),), ALIKE),
    # In the next group.
    ("async", (Death(2, "batch", 20), Death(3, "regrouped", 1)), WAYS["gloo"]),
    ("async", tuple(Death(r, "batch", 18 + 2 * r) for r in (1, 2, 3)), WAYS["gloo"]),
]
MORE_CASES: list[Case] = [
    ("async", (Death(2, "batch"),), {"freezes": True}),
    *(
        (policy, (Death(2, place, at),), {"freezes": True, **CODED["int8"]})
        for policy in ("cadence", "async")
        for place, at in (("batch", 3), ("between", 1), ("before opened", 2))
    ),
    # When it is connected to the next group.
    (
        "async",
        (Death(2, "before sending, late", 2), Death(3, "reconnecting", 1)),
        WAYS["gloo"],
    ),
]


@pytest.mark.parametrize(
    ("policy", "deaths", "more"),
    [*CASES, *(pytest.param(*case, marks=SLOW) for case in MORE_CASES)],
    ids=str,
)
def test_deaths_are_outlived(
    policy: str, deaths: tuple[Death, ...], more: dict[str, Any], tmp_path: Path
) -> None:
    outlive(tmp_path, deaths, policy, **more)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_deaths_at_every_place_where_optimizers_are_alike(
    way: str, rank: int, tmp_path: Path
) -> None:
    common = "batch", "before closed", "after closed", "before reduced"
    own = "before begun", "before finishing", "after finishing"
    places = [(place, 3) for place in (*common, *own, "after reduced")]
    outlive_each(tmp_path, rank, places, "cadence", **ALIKE, **WAYS[way])


@pytest.mark.slow
def test_who_lacks_the_sum_is_handed_it_where_optimizers_are_alike(
    tmp_path: Path,
) -> None:
    dead = (Death(2, "after reduced", REDUCTION, (0, 3)),)
    more = {"samples": 1600, "options": GLOO, "late": (1, WAITS), **ALIKE}
    survivors = outlive(tmp_path, dead, "cadence", **more)
    assert [each.handed for each in survivors] == [0, 1, 0]
    for commit in zip(*(each.commits for each in survivors), strict=True):
        assert identical([{"momentum": momentum} for momentum in commit])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("way", WAYS_AND_CODECS)
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_deaths_at_every_place(
    policy: str, way: str, rank: int, tmp_path: Path
) -> None:
    times = (3, 4) if "hosts" in way else (8, IN_A_SUM)  # there a rank sends less
    inside = [("sending a part", at) for at in times] if way in CODED else []
    for place in [*PLACES, *BETWEEN]:
        at = 1 if place in BETWEEN else 3
        at += place == "keys" or place.endswith("opened")  # of the second epoch
        inside.append((place, at))
    outlive_each(tmp_path, rank, inside, policy, **WAYS_AND_CODECS[way])


@pytest.mark.parametrize(
    ("policy", "how", "codec"),
    [
        ("cadence", WAITS, "fp32"),
        ("cadence", WAITS, "int4"),
        *(
            ("async", how, codec)
            for codec in ("fp32", "int4")
            for how in (WAITS, HOLDS, TRAINS)
        ),
    ],
)
@pytest.mark.every(2)
def test_who_lacks_the_sum_is_handed_it(
    policy: str, how: str, codec: str, tmp_path: Path
) -> None:
    """Over gloo a death leaves some ranks with a sum and others without."""
    holders = (0, 1, 3) if how == HOLDS else (0, 3)
    dead = (Death(2, "after reduced", REDUCTION, holders),)
    more = {"samples": 1600, "options": {"codec": codec, **GLOO}, "late": (1, how)}
    survivors = outlive(tmp_path, dead, policy, **more)
    assert [each.handed for each in survivors] == [0, how != HOLDS, 0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS_AND_CODECS)
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_deaths_while_the_next_group_forms(
    policy: str, way: str, tmp_path: Path
) -> None:
    for number, place in enumerate(["regrouping", "regrouped", "after sending"]):
        (folder := tmp_path / str(number)).mkdir()
        deaths = (Death(2, "after summing"), Death(1, place, 1 + 3 * (number == 2)))
        outlive(folder, deaths, policy, **WAYS_AND_CODECS[way])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS_AND_CODECS)
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_deaths_at_random_moments(policy: str, way: str, tmp_path: Path) -> None:
    draws = random.Random(f"{policy} {way}")
    for number in range(15):
        (folder := tmp_path / str(number)).mkdir()
        deaths = tuple(
            Death(rank, "time", draws.uniform(0.0, 0.6))
            for rank in draws.sample((1, 2, 3), draws.choice((1, 1, 2)))
        )
        print(policy, way, deaths)
        outlive(folder, deaths, policy, samples=2400, **WAYS_AND_CODECS[way])


def test_a_stopped_rank_is_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", 2.0)
    deaths = (Death(1, "stopped", 0.4),)
    outlive(tmp_path, deaths, "cadence", ranks=2, samples=2400, beat_s=0.2)
    assert re.search(r"rank 1 has been silent .* elche has ended it", caplog.text)


@pytest.mark.parametrize("policy", ["cadence", pytest.param("async", marks=SLOW)])
def test_a_rank_that_is_stopped_for_a_while_lives(policy: str, tmp_path: Path) -> None:
    survivors = outlive(tmp_path, (), policy, slow=(2, pause, PAUSE_S))
    assert survivors[2].found[0] >= PAUSE_S, "the fault did not happen"


def test_a_rank_that_holds_the_gil_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Once: it was killed, the next one in the next epoch, and the last trained alone.
    monkeypatch.setattr(liveness, "SILENT_S", 2.0)
    monkeypatch.setattr(liveness, "QUIET_S", 1.0)
    monkeypatch.setattr(coordinator, "STALLED_S", 1.0)
    beats = {"quiet_s": 0.5, "beat_s": 0.2}
    outlive(tmp_path, (), "cadence", ranks=3, slow=(0, hold_the_gil, 3.5), **beats)
    assert "rank 0 is at a call into C code that holds the GIL" in caplog.text


@pytest.mark.parametrize("meeting", ["evaluate", "predict"])
@pytest.mark.every(2)
def test_who_dies_evaluating_is_not_waited_for(meeting: str, tmp_path: Path) -> None:
    """The others, through with their part, evaluate all of it again."""
    deaths = (Death(2, "evaluating", 1),)
    survivors = outlive(tmp_path, deaths, "cadence", samples=160, meeting=meeting)
    assert [each.found for each in survivors] == [[(SIZE - 1) / 2] * 2] * 3


def test_a_full_disk_of_one_rank_costs_one_checkpoint(tmp_path: Path) -> None:
    ranks = outlive(tmp_path, (), "cadence", samples=160, meeting="save_on_a_full_disk")
    for rank in (0, 2):
        failed, second = ranks[rank].found
        assert re.match(f"rank {rank} could not write .*File too large", failed)
        assert second == "written"
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.manifest.world_size == 4


def test_a_checkpoint_waits_for_no_part_of_a_dead_rank(tmp_path: Path) -> None:
    deaths = (Death(2, "writing", 1),)
    ranks = outlive(tmp_path, deaths, "async", samples=160, meeting="save_whole")
    first, second = ranks[0].found
    assert "a rank has died before all parts were written" in first
    assert second == "written"
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.manifest.world_size == 3


@pytest.mark.parametrize("meeting", ["gather", pytest.param("evaluate", marks=SLOW)])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 2])
@pytest.mark.parametrize("at", [1, 2])
def test_a_death_in_the_sum_itself(
    meeting: str, rank: int, at: int, tmp_path: Path
) -> None:
    """Before the numbers of rows are summed, and before the rows are."""
    deaths, two = (Death(rank, "meeting", at),), {"samples": 160, "meeting": meeting}
    for each in outlive(tmp_path, deaths, "async", **two):
        assert each.found == ([9, 9] if meeting == "gather" else [(SIZE - 1) / 2] * 2)


@pytest.mark.slow
def test_a_second_death_while_a_step_is_handed_over_ends_the_run_by_name(
    tmp_path: Path,
) -> None:
    """Who takes it may have half of it by then."""
    more = {"samples": 1600, "options": GLOO, "late": (1, WAITS), **ALIKE}
    deaths = Death(2, "after reduced", REDUCTION, (0, 3)), Death(0, "handing over", 1)
    outcomes, _ = run_with(tmp_path, deaths, "cadence", **more)
    says = "a second rank died while ranks copied a common"
    assert all(says in str(outcomes[rank].error) for rank in (1, 3))


OUTSIDE = "RankLostError: rank %d: rank 2 died where the others cannot recover"
TOO_EARLY = "RemoteRankError: rank 2 is gone: .*before the first epoch has begun"


@pytest.mark.parametrize(
    ("meeting", "place", "says"),
    [
        pytest.param("copies", "sharing copies", OUTSIDE, marks=pytest.mark.slow),
        pytest.param("resume", "agreed", TOO_EARLY, marks=pytest.mark.slow),
        ("barrier", "setup", TOO_EARLY),
    ],
    ids=["sharing copies", "resuming", "before any epoch"],
)
def test_a_death_elsewhere_ends_the_run_by_name(
    meeting: str, place: str, says: str, tmp_path: Path
) -> None:
    """Within seconds, not at the deadline."""
    began_s, deaths = time.monotonic(), (Death(2, place, 1),)
    outcomes, lost = run_with(tmp_path, deaths, "async", samples=160, meeting=meeting)
    assert time.monotonic() - began_s < 40.0  # of 60
    # In a pool a rank that raises says no word of it, and is taken for dead.
    assert 2 in lost if says == OUTSIDE else not lost
    for rank in (0, 1, 3):
        error = outcomes[rank].error
        assert error is not None
        assert error.way == "raised"
        assert re.search(says.replace("%d", str(rank)), error.text), error.text
