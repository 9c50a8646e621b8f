"""Deaths where an epoch ends, and ranks agree whether to save: the others continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from elche.checkpoint.store import CheckpointStore
from tests.distributed.cases.deaths import Death
from tests.distributed.test_survive import outlive
from tests.harness.choices import wanted as wanted

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("wanted")]

SLOW = pytest.mark.slow
PLACES = ("before barrier", "after barrier", "agreed")
"""Before and after a rank has said that it is there, and when all are."""


@pytest.mark.parametrize(
    ("policy", "ranks", "turn"),
    [
        ("sync", (0, 1, 2), 1),
        ("async", (2, 0, 1), 0),
        *(
            pytest.param(policy, ranks, turn, marks=SLOW)
            for policy in ("sync", "cadence", "async", "auto")
            for ranks in ((0, 1, 2), (1, 2, 0), (2, 0, 1))
            for turn in range(3)
        ),
    ],
)
@pytest.mark.every(2)
def test_deaths_as_epochs_end(
    policy: str, ranks: tuple[int, ...], turn: int, tmp_path: Path
) -> None:
    """Each of three in turn, at each place; once in a sum that ended the whole run."""
    places = (*PLACES[turn:], *PLACES[:turn])
    deaths = tuple(map(Death, ranks, places, (1, 2, 3)))
    outlive(tmp_path, deaths, policy, epochs=5, meeting="nothing", agrees=True)


@pytest.mark.parametrize("place", [*PLACES[:2], pytest.param(PLACES[2], marks=SLOW)])
@pytest.mark.every(2)
def test_a_death_of_rank_0_in_save(place: str, tmp_path: Path) -> None:
    """The next rank chooses the checkpoint, where that was not settled."""
    deaths = (Death(0, place, 3),)  # after the first epoch's, and its end
    outlive(tmp_path, deaths, "cadence", 3, epochs=3, meeting="save", agrees=True)
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.manifest.world_size == 2
