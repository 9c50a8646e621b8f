"""How long ``auto`` takes a run to be."""

from __future__ import annotations

import pytest

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.auto.run_length import USUAL_EPOCHS, RunLength

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
    length = RunLength(said)
    length.begin_epoch(begun, SIZES)
    length.begin_epoch(begun, BatchSizes.of([32] * 7))  # the rest of the same
    assert length.batches == expected * 101
    assert ("assuming" in str(length)) == (said is None)
