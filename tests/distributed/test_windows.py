"""Policy `async`, gradient windows, plans and `auto`, in real processes."""

from __future__ import annotations

import pytest

from tests.distributed.cases.tasks import (
    Task,
    difference,
    identical,
    positions,
    shared,
)
from tests.distributed.cases.window_cases import shared_over_slow_link, trained_by
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed
NEW_RANKS = True


@pytest.mark.parametrize(
    "policy", ["sync", pytest.param("cadence", marks=pytest.mark.slow), "async"]
)
def test_deterministic_runs_are_equal_to_the_bit(ranks2: RankPool, policy: str) -> None:
    options = {"deterministic": True, "speed_hints": (1.0, 0.5)}
    options |= {"seed": 5, "policy": policy}
    task = Task(samples=600, batch_size=8, optimizer="adamw", options=options)
    runs = [
        ranks2.serve(shared, task, env=speeds)
        for speeds in (FOUR_TO_ONE, FOUR_TO_ONE[::-1])
    ]
    assert [t.orders for t in runs[0]] == [t.orders for t in runs[1]]
    assert identical([trace.state for run in runs for trace in run])


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
