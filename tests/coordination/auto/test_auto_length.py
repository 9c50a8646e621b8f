"""How long ``auto`` takes a run to be."""

from __future__ import annotations

import pytest

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_choice import USUAL_EPOCHS
from elche.coordination.auto.auto_policy import AutoPolicy
from elche.coordination.policy import Member

SIZES = BatchSizes.of([32] * 100 + [8])


@pytest.mark.parametrize(
    ("said", "begun", "expected"),
    [
        (None, 0, USUAL_EPOCHS),
        (None, 4, USUAL_EPOCHS),
        (None, 49, 100),
        (3, 0, 3),
        (3, 2, 3),
        (3, 3, USUAL_EPOCHS),
        (20, 20, 42),
    ],
)
def test_it_is_as_long_as_was_said_or_ten_epochs_or_twice_what_was_begun(
    said: int | None, begun: int, expected: int
) -> None:
    members = [Member(rank, "cpu", 2) for rank in range(2)]
    settings = Settings(config=RunConfig(policy="auto"), epochs=said)
    policy = AutoPolicy(members, settings)
    policy.begin_epoch(begun, SIZES, 0.0)
    assert policy._length.batches == expected * 101
