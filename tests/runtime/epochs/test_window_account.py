"""A rank's account of its windows, against a scripted shell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.averaging.window_sync import SyncResult
from elche.comm.gradients.gradient_window import GradientWindow
from elche.comm.model_buffers.window_buffers import WindowBuffers
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.events import (
    BatchesDone,
    Event,
    ModelUpdated,
    WindowClosed,
)
from elche.coordination.protocol.instructions import (
    CloseWindow,
    EndEpoch,
    Instruction,
    Reduce,
)
from elche.runtime.epochs import window_epoch
from elche.runtime.windows.gradient_sync import GradientSync
from tests.comm.plans import plan
from tests.comm.thread_group import on_ranks
from tests.coordination.windows.test_window_loop import reduction
from tests.coordination.windows.test_worker_waits import (
    NeedlessWaitError,
    Shell,
    Sync,
    epoch_of,
    grant,
    open_window,
)

CLOSE = CloseWindow(rank=0, epoch=0, window=0, drain=False)


class Overlapped(Sync):
    """A reduction that is complete after so many polls."""

    is_overlapped = True
    polls_left = 1000

    def begin(self, plan: Reduce) -> None:
        """Nothing travels."""

    def poll(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0

    def finish(self, plan: Reduce, *, is_drained: bool) -> SyncResult:
        return SyncResult(0.25, 2.0)

    def common(self) -> dict[int, Any]:
        return {}


class Clock:
    """Moves a little with every look at it."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1 / 1024
        return self.now_s


def end() -> EndEpoch:
    return EndEpoch(rank=0, epoch=0, samples=8, sync_s=0.1, windows=1, anchor=1)


def answer(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    closed: Sequence[Instruction],
    updated: Sequence[Instruction],
) -> None:
    """What comes where this rank has closed a window, and where it has a result."""

    def sends(*events: Event) -> None:
        shell.sent.extend(events)
        for event in events:
            shell.inbox.extend(closed if isinstance(event, WindowClosed) else ())
            shell.inbox.extend(updated if isinstance(event, ModelUpdated) else ())

    monkeypatch.setattr(shell, "send", sends)


def test_a_windows_weight_is_the_sum_of_its_batches_weights() -> None:
    shell, feed, epoch = epoch_of(1)
    shell.inbox.extend([open_window(0, None), grant(0), grant(1)])
    feed.when_empty = [[CLOSE]]
    feed.weight = 3.0
    with pytest.raises(AssertionError):  # nothing more comes
        list(epoch.batches())
    assert [e.weight for e in shell.sent if isinstance(e, WindowClosed)] == [6.0]
    assert epoch._weight is None  # of the next window
    done = [e for e in shell.sent if isinstance(e, BatchesDone)]
    assert sum(e.samples for e in done) == 16


class Blocking(Sync):
    """A reduction of one rank."""

    def reduce(self, plan: Reduce) -> SyncResult:
        return SyncResult(0.25, 2.0)

    def common(self) -> dict[int, Any]:
        return {}


def test_leases_that_went_back_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, feed, epoch = epoch_of(1, Blocking())

    answer(shell, monkeypatch, [reduction()], [open_window(1, None)])
    shell.inbox.extend([open_window(0, None), grant(0), grant(1)])
    batches = epoch.batches()
    assert next(batches) == "data"
    shell.inbox.append(CloseWindow(rank=0, epoch=0, window=0, drain=True))
    feed.when_empty = [[end()]]
    with pytest.raises(NeedlessWaitError):  # for a lease: nothing is drawn
        next(batches)
    assert feed.when_empty


def test_what_the_device_computes_after_a_window_counts_in_one_batch_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell, _, epoch = epoch_of(1, Blocking())
    rest = iter([8.0, 0.0])  # in which the device drains
    monkeypatch.setattr(window_epoch, "time", Clock())
    monkeypatch.setattr(shell, "pace_device", lambda *at: next(rest) if at else 0.0)

    opened = [open_window(1, None), grant(1), grant(2)]
    answer(shell, monkeypatch, [reduction()], opened)
    shell.inbox.extend([open_window(0, None), grant(0)])
    batches = epoch.batches()
    next(batches)
    shell.inbox.append(CLOSE)
    for _ in range(2):
        next(batches)
    shell.inbox.append(end())
    list(batches)
    busy_s = [e.busy_s for e in shell.sent if isinstance(e, BatchesDone)]
    assert busy_s == pytest.approx([0.0, 8.0, 0.0], abs=0.1)


def test_a_result_reports_when_it_was_adopted_and_how_long_it_was_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, sync, waits = Clock(), Overlapped(), list[float]()
    monkeypatch.setattr(window_epoch, "time", clock)
    shell, _, epoch = epoch_of(1, sync)

    def sleeps(timeout_s: float) -> None:
        clock.now_s += timeout_s
        waits.append(timeout_s)

    monkeypatch.setattr(shell, "sleep_until_message", sleeps)
    answer(shell, monkeypatch, [open_window(1, None), reduction(), grant(1)], [end()])
    shell.inbox.extend([open_window(0, None), grant(0)])
    batches = epoch.batches()
    assert next(batches) == "data"
    shell.inbox.append(CLOSE)
    assert next(batches) == "data"  # of the next window, while the first is reduced
    sync.polls_left = 2  # complete after two polls, without work meanwhile
    list(batches)
    (said,) = [e for e in shell.sent if isinstance(e, ModelUpdated)]
    assert (said.window, said.adopted_at, said.divergence) == (0, 1, 0.25)
    assert len(waits) == 2
    assert said.wait_s == pytest.approx(sum(waits), abs=0.05)
    assert said.wait_s > 0.0


def test_what_a_poll_sums_is_a_cost_of_the_reduction_and_not_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, sync, polls, has_come = Clock(), Overlapped(), 0, False
    monkeypatch.setattr(window_epoch, "time", clock)
    shell, _, epoch = epoch_of(1, sync)

    def sums() -> bool:
        nonlocal polls
        polls += 1
        clock.now_s += 8.0
        return has_come

    monkeypatch.setattr(sync, "poll", sums)
    answer(shell, monkeypatch, [open_window(1, None), reduction(), grant(1)], [end()])
    shell.inbox.extend([open_window(0, None), grant(0)])
    batches = epoch.batches()
    next(batches)
    shell.inbox.append(CLOSE)
    next(batches)  # of the next window, after a poll
    has_come = True
    list(batches)
    (said,) = [e for e in shell.sent if isinstance(e, ModelUpdated)]
    assert said.sync_s == pytest.approx(8.0 * polls, abs=0.1)
    busy_s = [e.busy_s for e in shell.sent if isinstance(e, BatchesDone)]
    assert busy_s == pytest.approx([0.0, 0.0], abs=0.1)


def common_steps(group: Any, rate: float, factor: float) -> list[float]:
    """The parameter after a common step, and after one that rank 1 copies; the rate."""
    model, seen = nn.ParameterList([torch.zeros(1)]), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    buffers = WindowBuffers(model, group)
    sync = GradientSync([*model], optimizer, GradientWindow([*model], group), buffers)
    sync.begin_batch(2.0)
    (factor * model[0]).sum().backward()
    sync.batch_done()
    sync.close(begins=False)
    sync.reduce(plan(group.rank))
    seen.append(model[0].item())
    if group.rank == 0:
        model[0].data.fill_(7.0)
    buffers.take()
    sync.copy_result(group, 0, plan(group.rank), lacks=group.rank == 1, keeps=False)
    return [*seen, model[0].item(), optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(("factor", "rate"), [(1.0, 0.2), (math.nan, 0.1)])
def test_a_step_has_the_mean_rate_of_the_ranks_that_count(
    factor: float, rate: float
) -> None:
    """Each rank's own, as its schedule has set it, is left to it."""
    found = on_ranks(2, common_steps, [0.1, 0.3], [1.0, factor])
    assert found == [pytest.approx([-rate, 7.0, own]) for own in (0.1, 0.3)]


@pytest.mark.parametrize("lacks", [True, False])
def test_a_rank_whose_update_is_discarded_begins_anew_from_a_copied_result(
    lacks: bool,
) -> None:
    model, optimizers = nn.Linear(1, 1), Mock(return_value=[])
    group = Group.alone(1.0)
    sync = ParameterAverager(list(model.parameters()), model, optimizers, group)
    sync.build()
    nn.init.constant_(model.weight, math.nan)
    assert not sync.close(begins=False)
    sync._buffers.take()
    sync.copy_result(group, 0, plan(), lacks=lacks, keeps=False)
    assert optimizers.called == lacks
