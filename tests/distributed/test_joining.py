"""Ranks that join a run under way: every position once, and all ranks equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from elche.checkpoint.store import CheckpointStore
from tests.distributed.cases.deaths import Death
from tests.distributed.cases.joining_cases import Growing
from tests.distributed.grown import ended
from tests.distributed.test_survive import GLOO

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow


@pytest.mark.parametrize("policy", ["cadence", "async"])
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
    first, *_ = ended(Growing(folder=str(tmp_path), policy="async", saves=True))
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
