"""Policy `sync` is single-device training on the union batch, whatever the shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elche.runtime.watch.scaler_watch import NAME
from tests.distributed.cases.tasks import (
    Task,
    difference,
    identical,
    plain,
    positions,
    shared,
)
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed
NEW_RANKS = True

FOUR_TO_ONE = [
    {"ELCHE_SPEED": "1", "ELCHE_MS_PER_SAMPLE": "0.2"},
    {"ELCHE_SPEED": "0.25", "ELCHE_MS_PER_SAMPLE": "0.2"},
]


@pytest.mark.parametrize(
    ("dtype", "optimizer", "bound"),
    [("float32", "adamw", 1e-6), ("float64", "sgd", 1e-13)],
)
def test_unequal_shares_equal_one_process(
    ranks2: RankPool, dtype: str, optimizer: str, bound: float
) -> None:
    """With SGD shares are those of the hints, else they move as they are measured."""
    options: dict[str, Any] = {"speed_hints": (1.0, 0.25)}
    options["deterministic"] = is_planned = optimizer == "sgd"
    task = Task(
        samples=1600,
        batch_size=32,
        epochs=1,
        dtype=dtype,
        optimizer=optimizer,
        options=options,
    )
    reference = plain(task)
    traces = ranks2.serve(shared, task, env=FOUR_TO_ONE)
    assert len(reference.batch_sizes[0]) == 50
    assert not is_planned or traces[0].shares[0] == pytest.approx((0.8, 0.2), abs=0.03)
    assert identical([trace.state for trace in traces])
    assert difference(traces[0].state, reference.state) <= bound


@pytest.mark.parametrize(
    "task",
    [
        Task(samples=96, dtype="float64", loop="accumulate-in-place"),
        Task(samples=50, batch_size=4, dtype="float64", model="unused"),
        Task(dtype="float64", options={"bucket_cap_mb": 1e-5}),
    ],
    ids=str,
)
def test_ranks_end_as_one_process(ranks3: RankPool, task: Task) -> None:
    traces = ranks3.serve(shared, task)
    assert identical([trace.state for trace in traces])
    assert difference(traces[0].state, plain(task).state) <= 1e-12


def test_scaler_skips_together(ranks2: RankPool) -> None:
    task = Task(samples=96, loop="scaler")
    reference = plain(task)
    traces = ranks2.serve(shared, task)
    assert identical([trace.state for trace in traces])
    assert difference(traces[0].state, reference.state) <= 1e-6
    batches = 96 // task.batch_size
    assert traces[0].scalars == {NAME: pytest.approx(1 / batches)}
    assert traces[1].scalars == traces[0].scalars


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_what_a_scaler_skips_in_windows_counts_as_done_and_is_told(
    ranks2: RankPool, policy: str
) -> None:
    task = Task(samples=96, loop="scaler", options={"policy": policy})
    traces = ranks2.serve(shared, task)
    assert identical([trace.state for trace in traces])
    sizes = [trace.batch_sizes[-1] for trace in traces]
    assert sum(map(sum, sizes)) == 96
    skipped = 1 if len(sizes[1]) > 1 else 0
    assert traces[0].scalars == {NAME: pytest.approx(skipped / sum(map(len, sizes)))}


TASKS = [
    Task(samples=101, batch_size=16),
    Task(samples=101, batch_size=16, drop_last=True),
    Task(samples=7, batch_size=2),
    Task(samples=60, batch_size=8, sampler="every-other"),
    Task(samples=60, sampler="uneven"),
    Task(samples=64, batch_size=8, shuffle=False, num_workers=2),
    Task(samples=64, batch_size=8, num_workers=1, persistent_workers=True),
]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_position_once_in_the_users_order(ranks3: RankPool, task: Task) -> None:
    reference = plain(task)
    task = dataclasses.replace(task)
    traces = ranks3.serve(shared, task)
    for epoch in range(task.epochs):
        assert positions(traces, epoch) == sorted(reference.orders[epoch])
    assert {trace.length for trace in traces} == {reference.length}
    assert identical([trace.state for trace in traces])
    assert difference(traces[0].state, reference.state) <= 1e-5


def test_augmentation_draws_by_position(ranks2: RankPool) -> None:
    task = Task(samples=40, batch_size=8, options={"seed": 5})
    traces = ranks2.serve(shared, task)
    alone = shared(task)
    drawn = traces[0].draws | traces[1].draws
    assert drawn.keys() == alone.draws.keys()
    ours = [sorted(v for (e, _), v in drawn.items() if e == epoch) for epoch in (0, 1)]
    other = [
        sorted(v for (e, _), v in alone.draws.items() if e == epoch) for epoch in (0, 1)
    ]
    assert ours == other
    assert ours[0] != ours[1]


def test_ranks_draw_different_masks(ranks3: RankPool) -> None:
    traces = ranks3.serve(shared, Task())
    assert len({trace.mask for trace in traces}) == 3
