"""Policy `async`, gradient windows, plans and `auto`, in real processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.distributed.cases.tasks import (
    COMMON_STEPS,
    Task,
    difference,
    identical,
    plain,
    positions,
    shared,
)
from tests.distributed.cases.window_cases import (
    follow_progress_with_gradient_windows,
    share_with_slow_loader,
    shared_by_virtual_speeds,
    shared_over_slow_link,
    trained_by,
)
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed
NEW_RANKS = True


def _with(task: Task, **options: Any) -> Task:
    return dataclasses.replace(task, options={**task.options, **options})


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-13)])
@pytest.mark.every(3)
def test_a_gradient_window_is_a_step_on_the_union(
    ranks2: RankPool, optimizer: str, dtype: str, bound: float
) -> None:
    """Windows of two batches and one: every step is one on three batches' samples."""
    task = Task(
        samples=16 * 3 * 8 + 20,
        epochs=2,
        dtype=dtype,
        optimizer=optimizer,
        shuffle=False,
        options={**COMMON_STEPS, "local_batch_size": 16},
    )
    reference = plain(dataclasses.replace(task, batch_size=48, options={}))
    traces = ranks2.serve(shared, task)
    assert identical([trace.state for trace in traces])
    assert difference(traces[0].state, reference.state) <= bound


def test_gradient_windows_clip_after_the_reduction(ranks2: RankPool) -> None:
    """Windows of three local batches, of eight samples on two ranks."""
    task = Task(
        samples=16 * 3 * 4,
        shuffle=False,
        dtype="float64",
        options={**COMMON_STEPS, "windows_max_grad_norm": 0.1},
    )
    clipped = dataclasses.replace(task, batch_size=24, loop="clip", options={})
    traces = ranks2.serve(shared, task)
    assert difference(traces[0].state, plain(clipped).state) <= 1e-13
    free = plain(dataclasses.replace(clipped, loop="plain"))
    assert difference(traces[0].state, free.state) > 1e-3


def test_gradient_windows_share_the_rate_and_the_buffers(ranks2: RankPool) -> None:
    """Ranks step together at one rate, whenever each last looked at the schedule."""
    states = ranks2.serve(follow_progress_with_gradient_windows, 2, env=FOUR_TO_ONE)
    assert identical(states)
    assert float(states[0]["1.running_var"].min()) > 0


@pytest.mark.parametrize(
    "policy", ["sync", pytest.param("cadence", marks=pytest.mark.slow), "async"]
)
def test_deterministic_runs_are_equal_to_the_bit(ranks2: RankPool, policy: str) -> None:
    task = Task(samples=600, batch_size=8, optimizer="adamw", options={"seed": 5})
    task = _with(task, policy=policy, deterministic=True, speed_hints=(1.0, 0.5))
    runs = [
        ranks2.serve(shared, task, env=speeds)
        for speeds in (_speeds(1.0, 0.5), _speeds(0.5, 1.0))
    ]
    assert [t.orders for t in runs[0]] == [t.orders for t in runs[1]]
    assert identical([trace.state for run in runs for trace in run])


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.every(2)
def test_a_throttled_rank_stays_with_the_slowest(ranks2: RankPool, policy: str) -> None:
    task = Task(samples=480, batch_size=8, epochs=1)
    task = _with(task, policy=policy, max_batch_diff=0, local_batch_size=8)
    traces = ranks2.serve(shared_by_virtual_speeds, task, (0.002, 0.04))
    counts = [len(trace.batch_sizes[0]) for trace in traces]
    assert sum(counts) == 60
    # Free, the fast one does 57 of them. It may lead by one per window, and does what
    # is left when the slow one has no more to do.
    assert max(counts) <= 45


@pytest.mark.parametrize("sync_s", [0.0, 0.5])
def test_auto_picks_by_what_a_reduction_costs(ranks2: RankPool, sync_s: float) -> None:
    """Steps of milliseconds hide no reduction of 0.5 s; without it either may pay."""
    task = Task(samples=3200, batch_size=32, epochs=2, options={"policy": "auto"})
    results = ranks2.serve(shared_over_slow_link, task, sync_s)
    traces = [trace for trace, _ in results]
    said = results[0][1]
    stays = "elche: auto: sync" in said
    assert "predicted" in said
    assert sync_s == 0.0 or not stays
    for epoch in range(task.epochs):
        assert positions(traces, epoch) == sorted(range(3200))
    assert identical([trace.state for trace in traces])
    assert [windows == 100 for windows in traces[0].windows] == [stays, stays]


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_loader_three_times_slower_gets_a_third(
    ranks2: RankPool, policy: str
) -> None:
    """Delivered time counts: waiting for data moves shares as slow compute does.

    Under async nobody waits, and who comes first gets more, whatever clocks say; its
    shares are tested in simulations.
    """
    (fast, fast_s), (slow, slow_s) = ranks2.serve(
        share_with_slow_loader, policy, (0.001, 0.003)
    )
    assert fast_s == pytest.approx(0.001, rel=0.05)
    assert slow_s == pytest.approx(0.003, rel=0.15)
    assert fast + slow == pytest.approx(1.0)
    assert policy == "async" or fast == pytest.approx(0.75, rel=0.05)


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.every(2)
def test_a_sum_over_a_batch_steps_as_far_as_one_device(
    ranks2: RankPool, policy: str
) -> None:
    # Once: a sum over half of the batch, averaged, made half of the step.
    means = ranks2.serve(trained_by, policy, "mean")
    sums = ranks2.serve(trained_by, policy, "sum")
    assert identical([*means])
    assert identical([*sums])
    assert difference(sums[0], means[0]) < 1e-6


def _speeds(*speeds: float) -> Any:
    """Environment of emulated ranks, in the form that the pool takes."""
    return [{**FOUR_TO_ONE[0], "ELCHE_SPEED": str(speed)} for speed in speeds]
