"""What a rank says to people beside its work."""

from __future__ import annotations

import logging

import pytest
import torch

from elche.coordination.batch_ranges import BatchSizes
from elche.coordination.instructions import EndEpoch
from elche.runtime.news import RunNews
from elche.runtime.positions import EpochPositions

KEYS = [7, 3, 9, 1, 8, 2, 6]


def ended(*left_out: tuple[int, int]) -> EndEpoch:
    return EndEpoch(
        rank=0,
        epoch=4,
        samples=(7,),
        busy_s=(1.0,),
        data_wait_s=(0.0,),
        sync_s=0.0,
        windows=1,
        anchor=1,
        shares=(1.0,),
        left_out=left_out,
    )


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (torch.tensor(KEYS), ("[9, 1]", "[8, 2, 6]")),
        ([f"s{key}" for key in KEYS], ("['s9', 's1']", "['s8', 's2', 's6']")),
    ],
)
def test_what_was_left_out_twice_is_named_with_its_samples(
    keys: torch.Tensor | list[str],
    named: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The samples are keys of the data set, as the sampler drew them."""
    positions = EpochPositions(keys, BatchSizes(((2, 3), (1, 1))), 4, None)
    with caplog.at_level(logging.WARNING, "elche"):
        RunNews(1).name_left_out(ended((1, 2)), positions)
        assert caplog.messages == []  # one rank says it
        RunNews(0).name_left_out(ended((1, 2), (2, 4)), positions)
    first, second = caplog.messages
    assert first.startswith("epoch 4: batches 1 to 1 were left out: ")
    assert first.endswith(f"not tried again; samples {named[0]}")
    assert second.startswith("epoch 4: batches 2 to 3 were left out: ")
    assert second.endswith(f"samples {named[1]}")
