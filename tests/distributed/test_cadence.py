"""Policy `cadence`: windows by wall time, parameters averaged, nothing lost."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elche.runtime.coordinator import serve_in_thread
from tests.distributed.cases import Task, Trace, identical, plain, shared
from tests.distributed.test_sync import FOUR_TO_ONE, TASKS
from tests.distributed.window_cases import shared_by_virtual_speeds
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


def _positions(traces: list[Trace], epoch: int) -> list[int]:
    return sorted(index for trace in traces for index in trace.orders[epoch])


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_position_once(ranks3: RankPool, task: Task) -> None:
    reference = plain(task)
    task = dataclasses.replace(task, options={"policy": "cadence"})
    traces = ranks3.run(shared, task, case_setup=serve_in_thread)
    for epoch in range(task.epochs):
        assert _positions(traces, epoch) == sorted(reference.orders[epoch])
        sizes = sorted(s for trace in traces for s in trace.batch_sizes[epoch])
        assert sizes == sorted(reference.batch_sizes[epoch])
    assert identical([trace.state for trace in traces])


@pytest.mark.parametrize("drift_weights", ["equal", "samples", "sqrt"])
@pytest.mark.parametrize("optimizer_state", ["average", "local", "reset"])
def test_ranks_end_identical(
    ranks2: RankPool, drift_weights: str, optimizer_state: str
) -> None:
    options = {
        "policy": "cadence",
        "drift_weights": drift_weights,
        "optimizer_state": optimizer_state,
        "outer": "nesterov" if drift_weights == "equal" else "average",
    }
    task = Task(samples=320, optimizer="adamw", model="norm", options=options)
    traces = ranks2.run(shared, task, case_setup=serve_in_thread, env=FOUR_TO_ONE)
    assert identical([trace.state for trace in traces])
    assert all(torch.isfinite(v).all() for v in traces[0].state.values())


def test_the_fast_rank_does_four_times_the_work(ranks2: RankPool) -> None:
    """Windows of ten batches, but for the first, which measures, and an epoch's last.

    With equal counts it would be 50 windows, equal shares, and times of four to one.
    """
    options = {"policy": "cadence", "anchor": 2, "max_anchor": 2, "guard": False}
    task = Task(samples=1600, batch_size=8, epochs=2, options=options)
    traces = ranks2.run(
        shared_by_virtual_speeds, task, (0.01, 0.04), case_setup=serve_in_thread
    )
    assert 200 // 10 <= traces[0].windows[1] <= 30
    assert traces[0].shares[1] == pytest.approx((0.8, 0.2), abs=0.05)
    assert traces[0].busy_s[1] == pytest.approx((1.6, 1.6), abs=0.4)


def test_counters_add_up(ranks3: RankPool) -> None:
    task = Task(samples=101, batch_size=8, model="norm", options={"policy": "cadence"})
    traces = ranks3.run(shared, task, case_setup=serve_in_thread)
    assert int(traces[0].state["1.num_batches_tracked"]) == 2 * 13
    assert float(traces[0].state["1.running_var"].min()) > 0


def test_fixed_anchor_and_el_che_off(ranks2: RankPool) -> None:
    """Without the guard: in windows of so few batches noise alone may shorten one."""
    for options in ({"anchor": 2, "max_anchor": 2}, {"max_anchor": 0}):
        options = {"policy": "cadence", "guard": False, **options}
        task = Task(samples=128, options=options)
        traces = ranks2.run(shared, task, case_setup=serve_in_thread)
        assert identical([trace.state for trace in traces])
        if options.get("max_anchor") == 0:
            assert min(traces[0].windows) >= 4
            assert max(traces[0].batch_sizes[0]) == 16
        else:
            assert traces[0].anchors == [2, 2]


def test_break_on_one_rank_drains_for_all(ranks3: RankPool) -> None:
    task = Task(samples=400, batch_size=4, loop="break", options={"policy": "cadence"})
    traces = ranks3.run(shared, task, case_setup=serve_in_thread)
    assert identical([trace.state for trace in traces])
    for epoch in range(task.epochs):
        seen = _positions(traces, epoch)
        assert len(seen) == len(set(seen)) < 400


def test_one_window_of_plain_averaging_is_the_mean(ranks2: RankPool) -> None:
    """Two ranks, one batch each, averaged: known in closed form."""
    options = {
        "policy": "cadence",
        "outer": "average",
        "anchor": 1,
        "max_anchor": 1,
        "drift_weights": "equal",
    }
    task = Task(samples=32, epochs=1, dtype="float64", shuffle=False, options=options)
    traces = ranks2.run(shared, task, case_setup=serve_in_thread)
    parts = []
    for trace in traces:
        alone = dataclasses.replace(task, sampler=None)
        parts.append(_train_on(alone, trace.orders[0]))
    for name, value in traces[0].state.items():
        mean = (parts[0][name] + parts[1][name]) / 2
        torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-14)


def _train_on(task: Task, order: list[int]) -> dict[str, torch.Tensor]:
    """One plain SGD step on the given samples."""
    from tests.distributed.cases import Numbered, build

    model, optimizer, _ = build(task)
    data = Numbered(task.samples, dtype=task.dtype)
    index = torch.tensor(order)
    loss = torch.nn.functional.cross_entropy(model(data.x[index]), data.y[index])
    loss.backward()
    optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}
