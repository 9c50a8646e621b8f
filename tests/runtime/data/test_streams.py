"""Iterable data sets on several ranks: divided exactly, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elche.errors import MismatchError
from tests.distributed.cases.tasks import identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.runtime.data.cases.stream_cases import (
    ByWorker,
    Endless,
    OwnGenerator,
    Shuffled,
    Streamed,
    StreamTask,
    streamed,
)

pytestmark = pytest.mark.distributed
NEW_RANKS = True

UNEQUAL = [
    {"ELCHE_SPEED": "1", "ELCHE_MS_PER_SAMPLE": "0.2"},
    {"ELCHE_SPEED": "0.25", "ELCHE_MS_PER_SAMPLE": "0.2"},
]


def run(pool: RankPool, task: StreamTask) -> list[Streamed]:
    return pool.run(streamed, task, case_setup=serve_in_thread, env=UNEQUAL)


def positions(ranks: list[Streamed], epoch: int) -> list[int]:
    return sorted(index for rank in ranks for index in rank.orders[epoch])


@pytest.mark.parametrize(
    "task",
    [
        StreamTask(options={"policy": "sync"}),
        StreamTask(num_workers=1, options={"policy": "cadence"}),
        StreamTask(options={"policy": "async"}),
        StreamTask(ByWorker, num_workers=2, options={"policy": "cadence"}),
    ],
    ids=["sync", "cadence", "async", "divided among workers"],
)
def test_every_position_once_on_both_ranks(ranks2: RankPool, task: StreamTask) -> None:
    """Also of a stream that divides itself."""
    ranks = run(ranks2, task)
    for epoch in range(task.epochs):
        assert positions(ranks, epoch) == list(range(task.samples))
    assert [rank.length for rank in ranks] == [13, 13]
    assert identical([rank.state for rank in ranks])
    assert [rank.warnings for rank in ranks] == [[], []]


def test_augmentation_draws_by_position_whoever_reads(ranks2: RankPool) -> None:
    """On one rank or two, with loading processes or without: the same draws."""
    task = StreamTask(Shuffled, options={"policy": "cadence", "seed": 5})
    seen = [run(ranks2, task), run(ranks2, replace(task, num_workers=1))]
    draws = [ranks[0].draws | ranks[1].draws for ranks in seen]
    assert draws[0] == draws[1] == streamed(task).draws
    assert len(set(draws[0].values())) == 2 * task.samples


def test_the_rest_of_a_longer_stream_is_left(ranks2: RankPool) -> None:
    task = StreamTask(
        Endless, samples_per_epoch=60, epochs=3, options={"policy": "cadence"}
    )
    ranks = run(ranks2, task)
    for epoch in range(3):
        assert positions(ranks, epoch) == list(range(60))
    said = [line for rank in ranks for line in rank.warnings]
    assert said
    assert set(said) == {
        "the stream Endless yields more than the 60 samples of an epoch; the rest is "
        "ignored"
    }
    assert all(len(rank.warnings) <= 1 for rank in ranks)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (
            StreamTask(batch_size=None),
            "a loader with batch_size=None has no batches that policy 'sync'",
        ),
        (
            StreamTask(OwnGenerator),
            "the stream OwnGenerator is not the same on every rank: the first samples "
            "of epoch 0 on ranks [1] are not those of rank 0",
        ),
        (
            StreamTask(num_workers=2, divides=True),
            "a DataLoader worker read different samples from the stream Stream",
        ),
    ],
    ids=["no batches", "own generator", "divided by workers"],
)
def test_what_cannot_be_divided_is_named(
    ranks2: RankPool, task: StreamTask, says: str
) -> None:
    task = replace(task, options={"policy": "sync"})
    outcomes = ranks2.run(
        streamed, task, case_setup=serve_in_thread, env=UNEQUAL, expect_failure=True
    )
    errors = [str(outcome.error) for outcome in outcomes]
    assert all(errors)
    assert any(says in error for error in errors), errors
    if task.batch_size:
        assert all(MismatchError.__name__ in error for error in errors), errors
