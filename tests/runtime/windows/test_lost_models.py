"""Under ``sync`` a model that is no number ends the run, and its batch is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.distributed.cases.tasks import Task, label_sum
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.runtime.windows.cases.lost_cases import (
    train_to_the_end,
)

pytestmark = pytest.mark.distributed

BATCH, BAD = 8, 17
TASK = Task(samples=2000, batch_size=BATCH, epochs=1, shuffle=False)


def with_options(**options: Any) -> Task:
    return dataclasses.replace(TASK, options={"policy": "sync", **options})


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("plain", {}),
        ("plain", {"loss_reduction": "sum"}),
        ("plain", {"weight_of": label_sum}),
        ("accumulates", {}),
        ("breaks", {}),
    ],
)
def test_the_run_stops_soon_and_names_whose_samples(
    ranks2: RankPool, loop: str, options: dict[str, Any]
) -> None:
    """No part of a step of all ranks can be discarded."""
    task = with_options(**options)
    ends = ranks2.run(train_to_the_end, task, BAD, loop, case_setup=serve_in_thread)
    at = BAD // BATCH
    for said, rank, batches, steps in ends:
        assert "parameters have become NaN in epoch 0" in said
        assert batches == ((at, at + 1),)
        assert rank is not None
        assert f"rank {rank}'s own, in step {at}" in said
        # Its part of the batch, of which the other rank had the rest.
        named = said.rpartition("samples [")[2].rstrip("]").split(", ")
        assert str(BAD) in named
        assert len(named) < BATCH
        assert steps < 250
    assert ends[0][:3] == ends[1][:3]


def test_what_a_scaler_skips_stops_nothing(ranks2: RankPool) -> None:
    task = dataclasses.replace(with_options(), samples=160)
    ends = ranks2.run(train_to_the_end, task, BAD, "scaler", case_setup=serve_in_thread)
    assert [end[:3] for end in ends] == [("", None, ())] * 2


def test_a_rank_without_samples_is_not_blamed(ranks3: RankPool) -> None:
    """Batches of two samples, which a third rank runs along without."""
    task = dataclasses.replace(with_options(), samples=120, batch_size=2)
    ends = ranks3.run(train_to_the_end, task, BAD, "plain", case_setup=serve_in_thread)
    for said, rank, batches, _ in ends:
        assert batches == ((BAD // 2, BAD // 2 + 1),)
        assert f"rank {rank}'s own" in said
        assert f"samples [{BAD}" in said or f"{BAD}]" in said
