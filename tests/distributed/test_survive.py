"""Ranks that die in windows: the others go on, and every sample counts once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elche.runtime.process.coordinator import serve_in_thread
from tests.distributed.cases.late_sums import HOLDS, REDUCTION, TRAINS, WAITS
from tests.distributed.cases.survive_cases import Counted, Death, count
from tests.distributed.cases.tasks import identical
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

GLOO = {"transport": {"kind": "gloo"}}
SAMPLES = 640


def outlive(
    tmp_path: Path,
    deaths: tuple[Death, ...],
    policy: str,
    ranks: int = 4,
    samples: int = SAMPLES,
    epochs: int = 2,
    **more: Any,
) -> list[Counted]:
    """A run in which ranks die; what the others have at its end, checked."""
    options = {"policy": policy, "timeout_s": 60.0, **more.pop("options", {})}
    lost: list[int] = []
    with RankPool(ranks) as pool:

        def fence(rank: int) -> None:
            lost.append(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pool.pids[rank], signal.SIGKILL)

        outcomes = pool.run(
            count,
            *(str(tmp_path), deaths, samples, epochs, options),
            case_setup=partial(serve_in_thread, fence=fence),
            expect_failure=True,
            timeout_s=100.0,
            **more,
        )
    victims = {death.rank for death in deaths}
    errors = {each.rank: each.error for each in outcomes if each.error}
    others = [error for rank, error in errors.items() if rank not in victims]
    assert not others, "\n".join(map(str, others))
    assert set(lost) == victims, "a fault did not happen"
    for rank in victims:
        assert errors[rank].way == "died"
        assert "-9" in errors[rank].text
    survivors = [each.value for each in outcomes if each.rank not in victims]
    check_once(survivors, tmp_path, samples, epochs)
    assert [each.place for each in survivors] == list(range(len(survivors)))
    assert {each.world_size for each in survivors} == {len(survivors)}
    return survivors


def check_once(
    survivors: list[Counted], tmp_path: Path, samples: int, epochs: int
) -> None:
    """By the loops' logs, by the model's own counter, and by elche."""
    assert identical([each.state for each in survivors])
    counts = survivors[0].state["count"]
    assert counts.tolist() == [epochs] * samples
    assert {each.progress for each in survivors} == {float(samples * epochs)}
    handed: Counter[tuple[int, int]] = Counter()
    for path in tmp_path.glob("log*.txt"):
        for line in path.read_text().splitlines():
            epoch, *indices = map(int, line.split())
            handed.update((epoch, index) for index in indices)
    assert len(handed) == samples * epochs
    weights = survivors[0].state["w"]
    assert bool((weights < 0).all())  # each was stepped along


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


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("place", ["batch", "after closed", "after summing"])
def test_a_death_is_outlived(policy: str, place: str, tmp_path: Path) -> None:
    outlive(tmp_path, (Death(2, place),), policy)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_deaths_at_every_place(
    policy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for place in [*PLACES, *BETWEEN]:
        at = 1 if place in BETWEEN else 3
        at += place == "keys" or place.endswith("opened")  # of the second epoch
        (folder := tmp_path / place).mkdir()
        print(policy, options, place)
        outlive(folder, (Death(2, place, at),), policy, options=options)


@pytest.mark.parametrize(
    ("policy", "how", "handed"),
    [
        ("cadence", WAITS, 1),
        ("async", WAITS, 1),
        ("async", TRAINS, 1),
        ("async", HOLDS, 0),
    ],
)
def test_who_lacks_the_sum_is_handed_it(
    policy: str, how: str, handed: int, tmp_path: Path
) -> None:
    """Over gloo a death leaves some ranks with a sum and others without."""
    holders = (0, 1, 3) if how == HOLDS else (0, 3)
    dead = (Death(2, "after reduced", REDUCTION, holders),)
    survivors = outlive(tmp_path, dead, policy, options=GLOO, late=(1, how))
    assert [each.handed for each in survivors] == [0, handed, 0]


@pytest.mark.parametrize(
    "deaths",
    [
        (Death(2, "batch", 20), Death(3, "regrouped", 1)),
        (Death(1, "batch", 20), Death(2, "batch", 22), Death(3, "batch", 24)),
    ],
    ids=["in the next group", "all others"],
)
def test_several_deaths(deaths: tuple[Death, ...], tmp_path: Path) -> None:
    outlive(tmp_path, deaths, "async")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_deaths_while_the_next_group_forms(
    policy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for number, place in enumerate(["regrouping", "regrouped", "after sending"]):
        (folder := tmp_path / str(number)).mkdir()
        deaths = (Death(2, "after summing"), Death(1, place, 1 + 3 * (number == 2)))
        outlive(folder, deaths, policy, options=options)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_deaths_at_random_moments(
    policy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    draws = random.Random(f"{policy} {options}")
    for number in range(15):
        (folder := tmp_path / str(number)).mkdir()
        deaths = tuple(
            Death(rank, "time", draws.uniform(0.0, 0.6))
            for rank in draws.sample((1, 2, 3), draws.choice((1, 1, 2)))
        )
        print(policy, options, deaths)
        outlive(folder, deaths, policy, options=options, samples=2400)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_stopped_rank_is_dead_for_good(policy: str, tmp_path: Path) -> None:
    """Fenced by SIGKILL, while the others have gone on."""
    outlive(tmp_path, (Death(2, "stopped", 0.4),), policy, samples=2400)
