"""Policy `cadence`: windows by wall time, parameters averaged, nothing lost."""

from __future__ import annotations

import dataclasses
import logging
import re
from itertools import islice

import pytest

import elche
from elche.errors import NonFiniteError, RemoteRankError
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.session.process import failing_together
from tests.distributed.cases.tasks import (
    Task,
    Trace,
    begin,
    identical,
    plain,
    shared,
    take_step,
)
from tests.distributed.cases.window_cases import shared_by_virtual_speeds
from tests.distributed.test_sync import TASKS
from tests.harness.logged import logged
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed
NEW_RANKS = True


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("task", TASKS, ids=str)
@pytest.mark.every(3)
def test_every_position_once(ranks3: RankPool, task: Task, policy: str) -> None:
    reference = plain(task)
    task = dataclasses.replace(task, options={"policy": policy})
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


def break_aloud(policy: str) -> list[str]:
    """Rank 1 breaks off after its third batch; what this rank logged."""
    model, optimizer, loader = begin(Task(samples=400, batch_size=4), policy=policy)
    with logged("elche", logging.INFO) as lines:
        for number, (x, y, _, _) in enumerate(loader):
            take_step(model, optimizer, x, y)
            if elche.rank() == 1 and number == 2:
                break
    elche.shutdown()
    return lines


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_break_says_so(ranks2: RankPool, policy: str) -> None:
    quiet, aloud = ranks2.serve(break_aloud, policy)
    (said,) = [line for line in aloud if "left the loop" in line]
    assert re.fullmatch(
        r"rank 1 left the loop of epoch 0 early, after \d+ batches of window \d+: the "
        r"epoch ends on all ranks, and \d+ batches leased to this rank return to .*",
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
