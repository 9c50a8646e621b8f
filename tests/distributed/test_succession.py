"""The death of rank 0: the next one draws orders and writes checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from elche.checkpoint.store import CheckpointStore
from tests.distributed.cases.succession_cases import Ordered, reference, train
from tests.distributed.cases.survive_cases import Death
from tests.distributed.test_survive import outlive
from tests.harness.fenced import run_fenced

pytestmark = pytest.mark.distributed

SAMPLES, EPOCHS = 320, 3


def succeed(
    tmp_path: Path,
    deaths: tuple[Death, ...],
    policy: str = "cadence",
    kind: str = "own",
    ranks: int = 3,
    late_rank: int = -1,
    *,
    saves: bool = False,
) -> list[Ordered]:
    """A run that loses its first rank; what the others have at its end, checked."""
    given = str(tmp_path), deaths, policy, kind, SAMPLES, EPOCHS, late_rank, saves
    outcomes, lost = run_fenced(ranks, train, *given)
    victims = {0} if saves else {death.rank for death in deaths}
    errors = {each.rank: each.error for each in outcomes if each.error}
    others = [error for rank, error in errors.items() if rank not in victims]
    assert not others, "\n".join(map(str, others))
    assert set(lost) == victims, "a fault did not happen"
    survivors = [each.value for each in outcomes if each.rank not in victims]
    assert [each.place for each in survivors] == list(range(len(survivors)))
    expected = reference(kind, SAMPLES, EPOCHS)
    for each in survivors:
        assert each.orders == expected, "another order than a single process's"
        assert each.counts == [EPOCHS] * SAMPLES
    return survivors


@pytest.mark.parametrize(
    ("policy", "place"), [("cadence", "batch"), ("async", "after summing")]
)
def test_rank_0_is_outlived(policy: str, place: str, tmp_path: Path) -> None:
    outlive(tmp_path, (Death(0, place),), policy)


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
    succeed(tmp_path, (Death(0, place, at),), kind="global")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "batch sampler", "weighted"])
def test_however_they_are_drawn(kind: str, tmp_path: Path) -> None:
    succeed(tmp_path, (Death(0, "batch", 10),), "async", kind)


def test_who_has_the_order_gives_it_to_who_has_not(tmp_path: Path) -> None:
    succeed(tmp_path, (Death(0, "after keys", 2),), late_rank=2)


@pytest.mark.slow
def test_the_successor_is_succeeded(tmp_path: Path) -> None:
    deaths = Death(0, "batch", 10), Death(1, "keys", 2)
    succeed(tmp_path, deaths, kind="global", ranks=4)


def test_rank_0_dies_while_it_writes_a_checkpoint(tmp_path: Path) -> None:
    """The one that it leaves does not count, and the next rank's does."""
    succeed(tmp_path, (), saves=True)
    assert CheckpointStore(tmp_path / "epoch0").newest() is None
    for epoch in range(1, EPOCHS):
        newest = CheckpointStore(tmp_path / f"epoch{epoch}").newest()
        assert newest is not None
        assert newest.manifest.world_size == 2
        done = newest.manifest.info["samples"]
        assert epoch * SAMPLES < done < (epoch + 1) * SAMPLES
