"""Policy `async`, gradient windows, plans and `auto`, in real processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.errors import NonFiniteError
from elche.runtime.coordinator import serve_in_thread
from tests.distributed.cases import (
    Task,
    Trace,
    build,
    difference,
    identical,
    plain,
    shared,
)
from tests.distributed.test_sync import FOUR_TO_ONE, TASKS
from tests.distributed.window_cases import (
    POISON,
    follow_progress_with_gradient_windows,
    share_with_slow_loader,
    shared_by_virtual_speeds,
    shared_over_slow_link,
    train_on_poison,
)
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


def _positions(traces: list[Trace], epoch: int) -> list[int]:
    return sorted(index for trace in traces for index in trace.orders[epoch])


def _with(task: Task, **options: Any) -> Task:
    return dataclasses.replace(task, options={**task.options, **options})


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_async_trains_on_every_position_once(ranks3: RankPool, task: Task) -> None:
    reference = plain(task)
    traces = ranks3.run(shared, _with(task, policy="async"), case_setup=serve_in_thread)
    for epoch in range(task.epochs):
        assert _positions(traces, epoch) == sorted(reference.orders[epoch])
    assert identical([trace.state for trace in traces])
    assert all(torch.isfinite(value).all() for value in traces[0].state.values())


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_async_over_each_transport(ranks2: RankPool, transport: str) -> None:
    task = Task(samples=3200, batch_size=8, epochs=1, model="norm", optimizer="adamw")
    task = _with(task, policy="async", transport=transport)
    traces = ranks2.run(shared, task, case_setup=serve_in_thread, env=FOUR_TO_ONE)
    assert identical([trace.state for trace in traces])
    assert int(traces[0].state["1.num_batches_tracked"]) == 400


def test_a_break_drains_async_for_all(ranks3: RankPool) -> None:
    task = Task(samples=400, batch_size=4, loop="break", options={"policy": "async"})
    traces = ranks3.run(shared, task, case_setup=serve_in_thread)
    assert identical([trace.state for trace in traces])
    for epoch in range(task.epochs):
        seen = _positions(traces, epoch)
        assert len(seen) == len(set(seen)) < 400


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-13)])
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
        options={
            "policy": "cadence",
            "update": "gradients",
            "deterministic": True,
            "speed_hints": (1.0, 0.5),
        },
    )
    reference = plain(dataclasses.replace(task, batch_size=48, options={}))
    traces = ranks2.run(shared, task, case_setup=serve_in_thread)
    assert identical([trace.state for trace in traces])
    assert difference(traces[0].state, reference.state) <= bound


def test_gradient_windows_clip_after_the_reduction(ranks2: RankPool) -> None:
    task = Task(
        samples=16 * 3 * 4,
        shuffle=False,
        dtype="float64",
        options={
            "policy": "cadence",
            "update": "gradients",
            "deterministic": True,
            "speed_hints": (1.0, 0.5),
            "max_grad_norm": 0.1,
        },
    )
    clipped = dataclasses.replace(task, batch_size=48, loop="clip", options={})
    traces = ranks2.run(shared, task, case_setup=serve_in_thread)
    assert difference(traces[0].state, plain(clipped).state) <= 1e-13
    free = plain(dataclasses.replace(clipped, loop="plain"))
    assert difference(traces[0].state, free.state) > 1e-3


def test_gradient_windows_share_the_rate_and_the_buffers(ranks2: RankPool) -> None:
    """Ranks step together at one rate, whenever each last looked at the schedule."""
    states = ranks2.run(
        follow_progress_with_gradient_windows,
        2,
        case_setup=serve_in_thread,
        env=FOUR_TO_ONE,
    )
    assert identical(states)
    assert float(states[0]["1.running_var"].min()) > 0


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_replay_on_other_data_is_refused(
    ranks2: RankPool, policy: str, tmp_path: Path
) -> None:
    record = str(tmp_path / "plan.json")
    task = Task(samples=200, batch_size=8, epochs=1)
    ranks2.run(
        shared, _with(task, policy=policy, record=record), case_setup=serve_in_thread
    )
    other = dataclasses.replace(task, samples=300)
    outcomes = ranks2.run(
        shared,
        _with(other, policy=policy, replay=record),
        case_setup=serve_in_thread,
        expect_failure=True,
    )
    errors = [outcome.error for outcome in outcomes]
    assert all(e is not None and "the record is of an epoch" in e.text for e in errors)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_recorded_run_replays_bit_for_bit(
    ranks3: RankPool, policy: str, tmp_path: Path
) -> None:
    record = str(tmp_path / "plan.json")
    task = Task(samples=700, batch_size=8, optimizer="adamw", options={"seed": 5})
    first = ranks3.run(
        shared,
        _with(task, policy=policy, record=record),
        case_setup=serve_in_thread,
        env=_speeds(1.0, 0.6, 0.3),
    )
    again = ranks3.run(
        shared,
        _with(task, policy=policy, replay=record),
        case_setup=serve_in_thread,
        env=_speeds(0.4, 1.0, 0.5),
    )
    assert [trace.orders for trace in again] == [trace.orders for trace in first]
    assert identical([first[0].state, *(trace.state for trace in again)])


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_deterministic_runs_are_equal_to_the_bit(ranks2: RankPool, policy: str) -> None:
    task = Task(samples=600, batch_size=8, optimizer="adamw", options={"seed": 5})
    task = _with(task, policy=policy, deterministic=True, speed_hints=(1.0, 0.5))
    runs = [
        ranks2.run(shared, task, case_setup=serve_in_thread, env=speeds)
        for speeds in (_speeds(1.0, 0.5), _speeds(0.5, 1.0))
    ]
    assert [t.orders for t in runs[0]] == [t.orders for t in runs[1]]
    assert identical([trace.state for run in runs for trace in run])


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_slowmo_is_averaging_until_it_has_momentum(
    ranks2: RankPool, policy: str
) -> None:
    task = Task(samples=200, batch_size=8, epochs=1, options={"seed": 5})
    task = _with(task, policy=policy, deterministic=True)
    average, plain, momentum = (
        ranks2.run(shared, _with(task, **outer), case_setup=serve_in_thread)
        for outer in (
            {"outer": "average"},
            {"outer": "slowmo", "outer_momentum": 0.0, "outer_lr": 1.0},
            {"outer": "slowmo"},
        )
    )
    assert average[0].windows[0] > 3
    assert identical([trace.state for trace in (*average, *plain)])
    assert identical([trace.state for trace in momentum])
    assert difference(momentum[0].state, average[0].state) > 1e-3


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_throttled_rank_stays_with_the_slowest(ranks2: RankPool, policy: str) -> None:
    task = Task(samples=480, batch_size=8, epochs=1)
    task = _with(task, policy=policy, max_batch_diff=0)
    traces = ranks2.run(
        shared_by_virtual_speeds, task, (0.002, 0.04), case_setup=serve_in_thread
    )
    counts = [len(trace.batch_sizes[0]) for trace in traces]
    assert sum(counts) == 60
    # Free, the fast one does 57 of them. It may lead by one per window, and does what
    # is left when the slow one has no more to do.
    assert max(counts) <= 45


@pytest.mark.parametrize(
    ("policy", "update"),
    [("cadence", "parameters"), ("cadence", "gradients"), ("async", "parameters")],
)
def test_a_poisoned_batch_alone_is_left_out(
    ranks2: RankPool, policy: str, update: str
) -> None:
    """Batches of the same windows go back, and are in the model in the end."""
    task = Task(samples=400, batch_size=8, epochs=1, shuffle=False)
    task = _with(task, policy=policy, update=update, anchor=4, max_anchor=4)
    task = _with(task, non_finite="leave_out")
    ranks = ranks2.run(train_on_poison, task, case_setup=serve_in_thread)
    seen = [index for rank in ranks for index in rank.order]
    assert seen.count(POISON) == 2
    left_out = [batch for part in ranks[0].left_out[0] for batch in range(*part)]
    assert left_out == [POISON // 8]
    assert set(range(400)) == set(seen)
    assert len(seen) > 400 + 8  # others were trained on again
    assert identical([rank.state for rank in ranks])
    assert all(torch.isfinite(value).all() for value in ranks[0].state.values())
    # Only what is in the model is counted; what was tried for nothing is told beside.
    metrics = ranks[0].metrics
    assert metrics == ranks[1].metrics
    assert metrics.samples == 400 - 8
    assert metrics.samples == ranks[0].progress_samples == ranks[1].progress_samples
    for rank, trained in enumerate(ranks):
        used = metrics.rank_samples[rank] + metrics.discarded_samples[rank]
        assert used == len(trained.order)
    moments = [value for rank in ranks for value in rank.moments]
    assert moments
    assert all(torch.isfinite(value).all() for value in moments)


def stop_at_poison(task: Task) -> tuple[str, tuple[tuple[int, int], ...]]:
    with pytest.raises(NonFiniteError, match=r"was not finite") as caught:
        train_on_poison(task)
    elche.shutdown()
    return str(caught.value), caught.value.batches


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_stops_at_what_is_no_number_again(
    ranks2: RankPool, policy: str, deterministic: bool
) -> None:
    """And names that batch alone on every rank, also where plans are fixed."""
    task = Task(samples=400, batch_size=8, epochs=1, shuffle=False)
    task = _with(task, policy=policy, anchor=4, max_anchor=4)
    task = _with(task, deterministic=deterministic)
    ends = ranks2.run(stop_at_poison, task, case_setup=serve_in_thread)
    at = POISON // 8
    for said, batches in ends:
        assert batches == ((at, at + 1),)
        assert f"samples {list(range(8 * at, 8 * at + 8))}" in said
        assert "for the second time" in said


def train_with_broken_ranks(task: Task, broken: tuple[int, ...]) -> str:
    """What the run ended with, "" if it did not."""
    model, optimizer, loader = build(task)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
    scale, said = float("nan") if elche.rank() in broken else 1.0, ""
    try:
        for _ in range(task.epochs):
            for x, y, _, _ in loader:
                (F.cross_entropy(model(x), y) * scale).backward()
                optimizer.step()
                optimizer.zero_grad()
    except NonFiniteError as error:
        said = str(error)
    elche.shutdown()
    return said


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_rank_that_brings_nothing_finite_stops_the_run(
    ranks2: RankPool, policy: str
) -> None:
    task = _with(Task(samples=400, batch_size=8, epochs=2), policy=policy, max_anchor=1)
    ends = ranks2.run(train_with_broken_ranks, task, (1,), case_setup=serve_in_thread)
    for said in ends:
        assert "what rank 1 learned in epoch" in said
        assert "in 3 windows in a row" in said or "for the second time" in said


def train_on_a_lost_model(task: Task) -> str:
    """The model is lost before an epoch; its batches are not at fault."""
    model, optimizer, loader = build(task)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
    for _ in loader:
        pass
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"before windows began in epoch 1") as no:
        next(iter(loader))
    elche.shutdown()
    return str(no.value)


@pytest.mark.parametrize(
    ("policy", "update"), [("cadence", "gradients"), ("async", "parameters")]
)
def test_no_batch_is_blamed_for_a_model_that_was_lost_before(
    ranks2: RankPool, policy: str, update: str
) -> None:
    task = _with(Task(samples=160, batch_size=8), policy=policy, update=update)
    task = _with(task, non_finite="leave_out")
    ends = ranks2.run(train_on_a_lost_model, task, case_setup=serve_in_thread)
    assert all("samples" not in said for said in ends)


def train_on_bad_beginning(task: Task) -> dict[str, torch.Tensor]:
    """An epoch whose first two batches are no numbers, BatchNorm in the way of them."""
    model, optimizer, loader = build(task)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
    for x, y, index, _ in loader:
        x[index < 2 * task.batch_size] = float("nan")
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    elche.shutdown()
    return state


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_statistics_outlive_a_window_that_is_rejected_whole(
    ranks2: RankPool, policy: str
) -> None:
    task = Task(samples=160, batch_size=8, model="norm", shuffle=False)
    task = _with(task, policy=policy, deterministic=True, non_finite="leave_out")
    states = ranks2.run(train_on_bad_beginning, task, case_setup=serve_in_thread)
    assert identical(states)
    assert all(torch.isfinite(value).all() for value in states[0].values())
    # Eighteen of twenty batches count.
    assert int(states[0]["1.num_batches_tracked"]) == 18


@pytest.mark.parametrize("sync_s", [0.0, 0.5])
def test_auto_picks_by_what_a_reduction_costs(ranks2: RankPool, sync_s: float) -> None:
    """Steps of milliseconds hide no reduction of 0.5 s; without it either may pay."""
    task = Task(samples=3200, batch_size=32, epochs=2, options={"policy": "auto"})
    results = ranks2.run(
        shared_over_slow_link,
        task,
        sync_s,
        case_setup=serve_in_thread,
    )
    traces = [trace for trace, _ in results]
    said = results[0][1]
    stays = "elche: policy sync" in said
    assert "predicted" in said
    assert sync_s == 0.0 or not stays
    for epoch in range(task.epochs):
        assert _positions(traces, epoch) == sorted(range(3200))
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
    (fast, fast_s), (slow, slow_s) = ranks2.run(
        share_with_slow_loader, policy, (0.001, 0.003), case_setup=serve_in_thread
    )
    assert fast_s == pytest.approx(0.001, rel=0.05)
    assert slow_s == pytest.approx(0.003, rel=0.15)
    assert fast + slow == pytest.approx(1.0)
    assert policy == "async" or fast == pytest.approx(0.75, rel=0.05)


def _speeds(*speeds: float) -> Any:
    """Environment of emulated ranks, in the form that the pool takes."""
    return [{**FOUR_TO_ONE[0], "ELCHE_SPEED": str(speed)} for speed in speeds]
