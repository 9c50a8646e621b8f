"""Ranks that die under ``sync`` over hosts, whose gradients are summed there first."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases.deaths import HOST_PLACES, Death
from tests.distributed.test_step_deaths import outlive, outlive_each

pytestmark = pytest.mark.distributed

LEADERS_ALONE = {"summing a host", "host summed", "handing on"}


def host_deaths(place: str, at: int, *ranks: int) -> list[Death]:
    return [Death(rank, place, at) for rank in ranks]


@pytest.mark.parametrize(
    ("ranks", "place", "at"),
    [
        ((2,), "handing on", 6),
        ((0,), "host summed", 7),
        ((3,), "offered", 6),
        ((2, 3), "forward", 4),
    ],
    ids=["a leader", "the first rank", "who leads no host", "a host"],
)
@pytest.mark.every(2)
def test_a_death_is_outlived(
    ranks: tuple[int, ...], place: str, at: int, tmp_path: Path
) -> None:
    deaths = host_deaths(place, at, *ranks)
    assert outlive(tmp_path, *deaths, ranks=4, hosts="aabb") == 0


@pytest.mark.parametrize("late", [1, 2], ids=["of the host", "of another host"])
@pytest.mark.every(2)
def test_who_lacks_sums_that_another_has_takes_them(late: int, tmp_path: Path) -> None:
    """Also from a host that has begun with the next, and changed these in place."""
    dead = Death(3, "step", 4)
    more = {"late": late, "late_at": 4, "clip": 0.1}
    assert outlive(tmp_path, dead, ranks=4, hosts="aabb", **more) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_deaths_at_every_place_of_a_bucket(rank: int, tmp_path: Path) -> None:
    places = HOST_PLACES.keys() - (LEADERS_ALONE if rank % 2 else set())
    for at in (6, 7):  # another bucket
        (folder := tmp_path / str(at)).mkdir()
        outlive_each(folder, dict.fromkeys(places, at), rank, ranks=4, hosts="aabb")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["_end_first", "ordered", "_reorder", "built"])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_death_in_the_first_backward_pass(
    rank: int, place: str, tmp_path: Path
) -> None:
    at = 4 if place == "built" else 1
    dead = Death(rank, place, at)
    assert outlive(tmp_path, dead, ranks=4, hosts="aabb") == 0


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2])
def test_a_death_while_sums_are_handed_over(at: int, tmp_path: Path) -> None:
    """Who has them still has them when another group has been formed."""
    deaths = Death(2, "step", 4), Death(3, "taken over", at)
    more = {"ranks": 4, "late": 1, "late_at": 4, "hosts": "aabb"}
    assert outlive(tmp_path, *deaths, **more) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"accumulate": 3},
        {"clip": 0.1},
        {"scaler": True},
        {"early": True, "workers": 1},
        {"loss": "weighted"},
        {"loss": "sum"},
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [1, 2])
def test_loops(rank: int, more: dict[str, Any], tmp_path: Path) -> None:
    dead = Death(rank, "offered", 8)
    assert outlive(tmp_path, dead, ranks=4, hosts="abba", **more) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deaths_at_random_moments(tmp_path: Path) -> None:
    draws = random.Random("hosts")
    for number in range(16):
        (folder := tmp_path / str(number)).mkdir()
        hosts = draws.choice(["aabb", "aaab", "abbb", "abab", "aabc"])
        victims = draws.sample((0, 1, 2, 3), draws.choice((1, 2)))
        times = sorted(draws.sample(range(1, 16), len(victims)))
        deaths = [
            Death(rank, "time", at / 40)
            for rank, at in zip(victims, times, strict=True)
        ]
        print(hosts, deaths)
        outlive(folder, *deaths, ranks=4, hosts=hosts, step_s=0.03)
