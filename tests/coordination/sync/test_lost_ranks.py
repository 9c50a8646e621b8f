"""What survivors settle where ranks have died in steps of ``sync``.

Whole runs: `tests/runtime/epochs/test_epochs.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import (
    BatchSizes,
    count_batches,
    joined,
)
from elche.coordination.agreement import Settings
from elche.coordination.protocol.events import ModelUpdated
from elche.coordination.sync.lost_ranks import LostRanks, Settlement, StepPlace, settle
from elche.coordination.sync.sync_policy import SyncPolicy
from tests.coordination.sync.granted_steps import HORIZON, members


@pytest.mark.parametrize(
    ("at", "place"),
    [
        ({"step": -1}, StepPlace(7, 0, -1)),
        ({"step": 3}, StepPlace(7, 4, 3)),
        ({"step": 3, "is_inside": True}, StepPlace(7, 3, 3)),
        ({"step": 3, "is_inside": True, "passed": 3}, StepPlace(7, 4, 3)),
        ({"step": 3, "is_inside": True, "waits": 2}, StepPlace(7, 2, 3)),
        ({"step": 3, "waits": 3}, StepPlace(7, 3, 3)),
    ],
    ids=["before", "between", "inside", "passed", "early", "fetches early"],
)
def test_a_place_names_the_first_step_that_no_held_sums_are_of(
    at: dict[str, Any], place: StepPlace
) -> None:
    usual: dict[str, Any] = {"is_inside": False, "waits": None, "passed": -1}
    assert StepPlace.at(7, **{**usual, **at}) == place


def test_sums_that_some_hold_are_taken_by_the_others() -> None:
    places = [StepPlace(4, 4, 4), StepPlace(5, 5, 4), StepPlace(4, 4, 5)]
    assert settle(places) == Settlement(source=1, passes=5, first=5, last=5)


def test_sums_that_none_holds_are_reduced_anew() -> None:
    places = [StepPlace(4, 4, 4), StepPlace(4, 4, 3)]
    assert settle(places) == Settlement(source=None, passes=4, first=4, last=4)


@pytest.mark.parametrize("last", range(HORIZON + 2))
@pytest.mark.parametrize("common", range(HORIZON + 3))
def test_what_is_left_after_a_death_is_what_no_survivor_holds(
    common: int, last: int
) -> None:
    """Rank 1's samples count before step ``common``; ``last`` is the last one run."""
    policy = SyncPolicy(members(*["CPU"] * 3), Settings(config=RunConfig()))
    policy.begin_epoch(0, BatchSizes(((6, 9),)), 0.0)
    policy.remove(1)
    for rank in (0, 2):
        policy.arrived(rank, ((1, common),))
    policy.regrouped({0: last, 2: last}, 0.0)
    assert policy.totals.samples == 0, "the others have not run these steps"
    for rank in (0, 2):
        event = ModelUpdated(rank=rank, epoch=0, window=last)
        is_over = policy.handle(event, 1.0).epoch_over
    policy.check()
    assert is_over
    lost = [(6 * step + 2, 6 * step + 4) for step in range(common, last + 1)]
    left = joined([*lost, (6 * last + 6, 54)])
    assert [*policy.positions_left] == left
    assert policy.totals.samples == 54 - count_batches(left)


def test_a_rank_that_ran_its_steps_in_an_earlier_group_runs_those_of_the_next() -> None:
    policy = SyncPolicy(members(*["CPU"] * 4), Settings(config=RunConfig()))
    policy.begin_epoch(0, BatchSizes(((8, 4),)), 0.0)
    for dead in (2, 3):
        policy.remove(dead)
        policy.arrived(0, ((dead, 0),))
        policy.handle(ModelUpdated(rank=0, epoch=0, window=-1), 0.0)
    policy.arrived(1, ())
    policy.arrived(0, ())
    policy.regrouped({0: 0, 1: 0}, 0.0)
    assert policy.waiting_for() == "ranks [0, 1] to finish the started steps"


def test_a_later_death_settles_anew_only_what_was_not_confirmed() -> None:
    """Who had the sums of the last pass may have died with them."""
    lost = LostRanks()
    lost.begin_part()
    assert not lost.is_settled
    assert lost.last > 99
    lost.take({2}, Settlement(1, 5, first=5, last=5))
    lost.take({2, 1}, Settlement(None, 4, first=4, last=5))
    assert lost.to_wire() == ((1, 4), (2, 4))
    lost.confirm()
    lost.take({0, 1, 2}, Settlement(None, 6, first=6, last=6))
    assert lost.to_wire() == ((0, 6), (1, 4), (2, 4))
    assert lost.is_settled
    assert lost.last == 6
    lost.begin_part()
    assert (lost.parts, lost.to_wire(), lost.is_settled) == (2, (), False)
