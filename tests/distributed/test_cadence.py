"""Policy `cadence`: windows by wall time, parameters averaged, nothing lost."""

from __future__ import annotations

import dataclasses
import logging.handlers
import re
from itertools import islice

import pytest
import torch

import elche
from elche.errors import NonFiniteError, RemoteRankError
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.session.process import failing_together
from tests.distributed.cases.tasks import (
    Task,
    Trace,
    begin,
    build,
    identical,
    plain,
    shared,
    state_of,
    take_step,
)
from tests.distributed.cases.window_cases import shared_by_virtual_speeds
from tests.distributed.test_sync import FOUR_TO_ONE, TASKS
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed
NEW_RANKS = True


def _positions(traces: list[Trace], epoch: int) -> list[int]:
    return sorted(index for trace in traces for index in trace.orders[epoch])


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_position_once(ranks3: RankPool, task: Task) -> None:
    reference = plain(task)
    task = dataclasses.replace(task, options={"policy": "cadence"})
    traces = ranks3.serve(shared, task)
    for epoch in range(task.epochs):
        seen = [part for trace in traces for part in _batches(trace, epoch)]
        whole = _batches(reference, epoch)
        assert sorted(seen) == sorted(part for one in whole for part in _cut(one, 3))
    assert identical([trace.state for trace in traces])
    assert {trace.length for trace in traces} == {reference.length}


def _batches(trace: Trace, epoch: int) -> list[tuple[int, ...]]:
    """What each batch of the loop held, in its order."""
    order = iter(trace.orders[epoch])
    return [tuple(islice(order, size)) for size in trace.batch_sizes[epoch]]


def _cut(batch: tuple[int, ...], ranks: int) -> list[tuple[int, ...]]:
    """A batch in its local batches: nearly equal, the larger first."""
    parts = min(ranks, len(batch))
    order = iter(batch)
    return [
        tuple(islice(order, len(batch) // parts + (part < len(batch) % parts)))
        for part in range(parts)
    ]


@pytest.mark.parametrize("outer", ["nesterov", "average"])
def test_ranks_end_identical(ranks2: RankPool, outer: str) -> None:
    options = {"policy": "cadence", "outer": outer}
    task = Task(samples=320, optimizer="adamw", model="norm", options=options)
    traces = ranks2.serve(shared, task, env=FOUR_TO_ONE)
    assert identical([trace.state for trace in traces])
    assert all(torch.isfinite(v).all() for v in traces[0].state.values())


def test_the_fast_rank_does_four_times_the_work(ranks2: RankPool) -> None:
    """Windows of ten batches, but for the first, which measures, and an epoch's last.

    With equal counts it would be 50 windows, equal shares, and times of four to one.
    """
    options = {"policy": "cadence", "anchor": 2, "max_anchor": 2, "guard": False}
    options["local_batch_size"] = 8
    task = Task(samples=1600, batch_size=8, epochs=2, options=options)
    traces = ranks2.serve(shared_by_virtual_speeds, task, (0.01, 0.04))
    assert 200 // 10 <= traces[0].windows[1] <= 30
    assert traces[0].shares[1] == pytest.approx((0.8, 0.2), abs=0.05)
    assert traces[0].busy_s[1] == pytest.approx((1.6, 1.6), abs=0.4)


def test_counters_add_up(ranks3: RankPool) -> None:
    task = Task(samples=101, batch_size=8, model="norm", options={"policy": "cadence"})
    traces = ranks3.serve(shared, task)
    local_batches = 12 * 3 + 2  # of a tail of five samples, at least two in each
    assert int(traces[0].state["1.num_batches_tracked"]) == 2 * local_batches
    assert float(traces[0].state["1.running_var"].min()) > 0


def test_fixed_anchor_and_el_che_off(ranks2: RankPool) -> None:
    """Without the guard: in windows of so few batches noise alone may shorten one."""
    for options in ({"anchor": 2, "max_anchor": 2}, {"max_anchor": 0}):
        options = {"policy": "cadence", "guard": False, **options}
        task = Task(samples=128, options=options)
        traces = ranks2.serve(shared, task)
        assert identical([trace.state for trace in traces])
        if options.get("max_anchor") == 0:
            assert min(traces[0].windows) >= 4
            assert max(traces[0].batch_sizes[0]) == 8  # of two ranks
        else:
            assert traces[0].anchors == [2, 2]


def test_break_on_one_rank_drains_for_all(ranks3: RankPool) -> None:
    task = Task(samples=400, batch_size=4, loop="break", options={"policy": "cadence"})
    traces = ranks3.serve(shared, task)
    assert identical([trace.state for trace in traces])
    for epoch in range(task.epochs):
        seen = _positions(traces, epoch)
        assert len(seen) == len(set(seen)) < 400


def break_aloud(policy: str) -> list[str]:
    """Rank 1 breaks off after its third batch; what this rank logged."""
    model, optimizer, loader = begin(Task(samples=400, batch_size=4), policy=policy)
    kept = logging.handlers.BufferingHandler(1000)
    logger = logging.getLogger("elche")
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        for number, (x, y, _, _) in enumerate(loader):
            take_step(model, optimizer, x, y)
            if elche.rank() == 1 and number == 2:
                break
    finally:
        logger.removeHandler(kept)
    elche.shutdown()
    return [record.getMessage() for record in kept.buffer]


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_break_says_so(ranks2: RankPool, policy: str) -> None:
    quiet, aloud = ranks2.serve(break_aloud, policy)
    (said,) = [line for line in aloud if "left the loop" in line]
    assert re.fullmatch(
        r"rank 1 left the loop of epoch 0 early, after \d+ batches of window \d+: the "
        r"epoch ends on all ranks, and \d+ batches leased to this one are given back",
        said,
    )
    assert not any("left the loop" in line for line in quiet)


def refuse_at_break(policy: str) -> str:
    """The run ends for what is no number, just as rank 0 leaves its loop."""
    task = Task(samples=400, batch_size=4, shuffle=False)
    *_, loader = begin(task, policy=policy)

    def leave(epoch: WindowEpoch) -> None:
        raise NonFiniteError("it was not finite", 1, [(1, 3)])

    if elche.rank() == 1:
        with pytest.raises(RemoteRankError, match=r"rank 0 failed: .*not finite"):
            list(loader)
        elche.shutdown()
        return ""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WindowEpoch, "_leave", leave)
        for _ in loader:
            break
    with (
        pytest.raises(NonFiniteError, match=r"it was not finite; samples") as caught,
        failing_together(),
    ):
        iter(loader)
    assert (caught.value.rank, caught.value.batches) == (1, ((1, 3),))
    elche.shutdown()
    return str(caught.value)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_what_is_met_at_a_break_names_its_samples(
    ranks2: RankPool, policy: str
) -> None:
    said, _ = ranks2.serve(refuse_at_break, policy)
    assert said == f"it was not finite; samples {list(range(2, 6))}"


def test_one_window_of_plain_averaging_is_the_mean(ranks2: RankPool) -> None:
    """Two ranks, one batch each, averaged: known in closed form."""
    options = {
        "policy": "cadence",
        "outer": "average",
        "anchor": 1,
        "max_anchor": 1,
        "local_batch_size": 16,
    }
    task = Task(samples=32, epochs=1, dtype="float64", shuffle=False, options=options)
    traces = ranks2.serve(shared, task)
    parts = []
    for trace in traces:
        alone = dataclasses.replace(task, sampler=None)
        parts.append(_train_on(alone, trace.orders[0]))
    for name, value in traces[0].state.items():
        mean = (parts[0][name] + parts[1][name]) / 2
        torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-14)


def _train_on(task: Task, order: list[int]) -> dict[str, torch.Tensor]:
    """One plain SGD step on the given samples."""
    from tests.distributed.cases.tasks import Numbered

    model, optimizer, _ = build(task)
    data = Numbered(task.samples, dtype=task.dtype)
    index = torch.tensor(order)
    loss = torch.nn.functional.cross_entropy(model(data.x[index]), data.y[index])
    loss.backward()
    optimizer.step()
    return state_of(model)
