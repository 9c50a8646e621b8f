"""What a rank says to people beside its work."""

from __future__ import annotations

import logging

import pytest
import torch

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.runtime.data.positions import EpochPositions
from elche.runtime.notifications import warn_discarded

KEYS = [7, 3, 9, 1, 8, 2, 6]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (torch.tensor(KEYS), "[9, 1, 8, 2, 6]"),
        ([f"s{key}" for key in KEYS], "['s9', 's1', 's8', 's2', 's6']"),
    ],
)
def test_a_discarded_update_is_told_with_its_rank_batches_and_samples(
    keys: torch.Tensor | list[str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The samples are keys of the data set, as the sampler drew them."""
    positions = EpochPositions(keys, BatchSizes(((2, 3), (1, 1))), 4, None)
    with caplog.at_level(logging.WARNING, "elche"):
        warn_discarded(3, [(1, 2), (2, 4)], positions)
    (said,) = caplog.messages
    assert said.startswith("rank 3: the update of epoch 4 from batches 1 to 3 ")
    assert said.endswith(f"samples {named}")


def test_of_many_samples_the_first_are_named(caplog: pytest.LogCaptureFixture) -> None:
    positions = EpochPositions(torch.arange(200), BatchSizes(((2, 100),)), 0, None)
    with caplog.at_level(logging.WARNING, "elche"):
        warn_discarded(0, [(0, 50)], positions)
    assert caplog.messages[0].endswith("62, 63] and 36 more")
