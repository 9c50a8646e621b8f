"""The death of rank 0: the next one draws orders and writes checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elche.checkpoint.store import CheckpointStore
from tests.distributed.cases.deaths import Death
from tests.distributed.cases.survive_cases import orders_alone
from tests.distributed.test_survive import outlive

pytestmark = pytest.mark.distributed

SAMPLES, EPOCHS = 320, 3


def succeed(
    tmp_path: Path,
    *deaths: Death,
    policy: str = "cadence",
    drawn: str = "own",
    ranks: int = 3,
    **more: Any,
) -> None:
    """A run that loses its first rank: the others' orders are a single process's."""
    more = {"samples": SAMPLES, "epochs": EPOCHS, "drawn": drawn, **more}
    expected = orders_alone(drawn, SAMPLES, EPOCHS)
    for each in outlive(tmp_path, deaths, policy, ranks, **more):
        assert each.orders == expected


@pytest.mark.parametrize(
    ("place", "at"),
    [
        ("batch", 10),
        ("keys", 2),
        pytest.param("before opened", 2, marks=pytest.mark.slow),
        pytest.param("after opened", 2, marks=pytest.mark.slow),
    ],
)
def test_the_orders_are_those_of_a_single_process(
    place: str, at: int, tmp_path: Path
) -> None:
    """Also where the order of the epoch that begins has died with rank 0."""
    succeed(tmp_path, Death(0, place, at), drawn="global")


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["own", "batch sampler", "weighted"])
def test_however_they_are_drawn(drawn: str, tmp_path: Path) -> None:
    succeed(tmp_path, Death(0, "batch", 10), policy="async", drawn=drawn)


def test_who_has_the_order_gives_it_to_who_has_not(tmp_path: Path) -> None:
    succeed(tmp_path, Death(0, "after keys", 2), late_order=2)


@pytest.mark.slow
def test_the_successor_is_succeeded(tmp_path: Path) -> None:
    deaths = Death(0, "batch", 10), Death(1, "keys", 2)
    succeed(tmp_path, *deaths, drawn="global", ranks=4)


def test_rank_0_dies_while_it_writes_a_checkpoint(tmp_path: Path) -> None:
    """The one that it leaves does not count, and the next rank's does."""
    succeed(tmp_path, Death(0, "saving", 1), saves=True)
    assert CheckpointStore(tmp_path / "epoch0").newest() is None
    for epoch in range(1, EPOCHS):
        newest = CheckpointStore(tmp_path / f"epoch{epoch}").newest()
        assert newest is not None
        assert newest.manifest.world_size == 2
        done = newest.manifest.info["samples"]
        assert epoch * SAMPLES < done < (epoch + 1) * SAMPLES
