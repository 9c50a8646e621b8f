"""Ranks that part are found within the epoch; those that do not are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.cases.parting import Parting, train
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


def parted(ranks: RankPool, parting: Parting) -> str:
    """The error, which both ranks got."""
    error, other = ranks.serve(train, parting)
    assert error == other
    assert error.startswith("ranks [1] and [0] hold different values in ")
    assert "noise" in error
    return error


AFTER_16 = "after step 16 of epoch 0; they were equal after step 8 of"
AT_THE_END = "at the end of epoch 0"
WINDOWS = ("cadence", "async")


@pytest.mark.parametrize(
    ("parting", "says"),
    [
        (Parting("lone step"), AFTER_16),
        (Parting("noise"), AFTER_16),
        (Parting("written"), AFTER_16),
        (Parting("noise", two_kinds=True), AFTER_16),
        (Parting("noise", is_last=True), AT_THE_END),
        (Parting("lone step", is_last=True), AT_THE_END),
        (Parting("frozen written", policy="auto"), ""),
        *((Parting("frozen written", policy=each), "after window") for each in WINDOWS),
        *((Parting("base", policy=each), "after window") for each in WINDOWS),
    ],
    ids=str,
)
def test_ranks_that_part_end_with_the_epoch_at_the_latest(
    ranks2: RankPool, parting: Parting, says: str
) -> None:
    assert says in parted(ranks2, parting)


def test_ranks_that_part_between_epochs_are_not_saved(
    ranks2: RankPool, tmp_path: Path
) -> None:
    error = parted(ranks2, Parting("", policy="cadence", folder=str(tmp_path)))
    assert "at elche.save" in error
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "parting",
    [
        Parting("alike"),
        Parting("alike", policy="cadence"),
        Parting("written", policy="async"),
        Parting("rounded", two_kinds=True),
        Parting("rounded", two_kinds=True, policy="async"),
    ],
    ids=str,
)
def test_what_does_not_part_them_is_not_refused(
    ranks2: RankPool, parting: Parting
) -> None:
    """Also a change that becomes a part of the ranks' mean, or that rounding makes."""
    assert ranks2.serve(train, parting) == ["", ""]
