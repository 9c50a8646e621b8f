"""What a rank says of its steps, and when: the shell and the simulator alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest

from elche.comm.gradients.part_weights import StepPart
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.protocol.events import EpochLeft, Event, StepsDone
from elche.coordination.protocol.instructions import (
    EndEpoch,
    GrantBatches,
    Instruction,
    RankLeft,
)
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.coordination.sync.step_reports import StepReports
from elche.runtime.data.positions import EpochPositions
from elche.runtime.sync.sync_epoch import SyncEpoch
from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.simulation import Simulation, Watch
from tests.coordination.windows.test_worker_waits import Shell as WorkerShell
from tests.harness.epoch_hooks import hooks_without_run
from tests.sim.books import Books

STEPS = 6
BATCH = 4
END = EndEpoch(
    rank=0, epoch=0, samples=STEPS * BATCH, sync_s=0.0, windows=STEPS, anchor=1
)


def grant(start: int, stop: int) -> GrantBatches:
    return GrantBatches(rank=0, epoch=0, start=start, stop=stop, shares=(BATCH,))


def cost(busy_s: float, *, warm: bool = True) -> BatchCost:
    return BatchCost(
        samples=BATCH,
        busy_s=busy_s,
        data_wait_s=busy_s / 4,
        transfer_s=busy_s / 8,
        sync_wait_s=busy_s / 2,
        is_timed=warm,
    )


def test_a_report_sums_what_its_steps_took() -> None:
    reports = StepReports(0, 3, NonFiniteRecord())
    reports.granted(grant(0, 2))
    reports.granted(grant(2, 3))
    assert not reports.step_done(0, cost(1.0, warm=False))
    assert reports.take() is None
    assert reports.step_done(1, cost(3.0))
    reports.close(backward_passes=2, max_samples=5)
    assert reports.due
    said = reports.take()
    assert said == StepsDone(
        rank=0,
        epoch=3,
        start=0,
        stop=2,
        samples=2 * BATCH,
        busy_s=4.0,
        data_wait_s=1.0,
        transfer_s=0.5,
        sync_wait_s=2.0,
        warm=False,
        backward_passes=2,
        max_samples=5,
    )
    assert reports.take() is None
    assert reports.step_done(2, cost(1.0))  # measured for itself
    reports.close(backward_passes=3)
    said = reports.take()
    assert said is not None
    assert (said.samples, said.busy_s, said.warm) == (BATCH, 1.0, True)


def test_a_change_of_the_group_voids_grants_and_what_was_measured() -> None:
    reports = StepReports(0, 0, NonFiniteRecord())
    reports.granted(grant(0, 2))
    assert not reports.step_done(0, cost(1.0))
    reports.void()
    assert not reports.step_done(1, cost(1.0))
    reports.void()
    reports.granted(grant(1, 2))
    assert reports.step_done(1, cost(2.0))
    reports.close(backward_passes=1)
    said = reports.take()
    assert said is not None
    assert (said.start, said.samples, said.busy_s) == (1, BATCH, 2.0)


class Shell(WorkerShell):
    """A rank's worker, loader and reducer, of which only what is said is real.

    The coordinator answers a report at once, by a grant of one more step or the end.
    """

    place = 0
    is_due = is_closed = meets_in_forward = False
    is_joinable = True
    max_samples = closed_passes = 0
    transfer_s = wait_s = work_s = 0.0
    backward_passes = pass_steps = 0
    weight: float | None = None
    parameters, emulation = (), None
    part_under_way = passed = None

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.inbox.extend(grant(number, number + 1) for number in range(3))
        self.queued: deque[tuple[Any, Any]] = deque()
        self.granted = 3
        self.on_backward: Callable[[], None] | None = None
        self.epoch: SyncEpoch | None = None

    # the worker
    def send(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, EpochLeft):
                self.inbox.append(END)
            if not isinstance(event, StepsDone):
                continue
            self.log.append(f"report {event.start}")
            if self.granted < STEPS:
                self.inbox.append(grant(self.granted, self.granted + 1))
                self.granted += 1
            elif event.stop == STEPS:
                self.inbox.append(END)

    on_lost: Callable[[], None] | None = None

    def receive(self, handle: Callable[[Instruction], None], why: str) -> None:
        self.log.append("wait")
        super().receive(handle, why)

    # the loader
    @property
    def has_work(self) -> bool:
        return bool(self.queued)

    def push(self, tag: Any, batch: Any) -> None:
        self.queued.append((tag, batch))

    def take(self) -> tuple[Any, Any] | None:
        if not self.queued and self.epoch is not None:
            self.epoch.refill()
        return self.queued.popleft() if self.queued else None

    def end(self) -> None:
        pass

    # the reducer
    def begin_step(self, part: StepPart) -> None:
        self.part = part

    def end_step(self) -> None:
        pass

    def backward(self) -> None:
        work, self.on_backward = self.on_backward, None
        if work is not None:
            work()


def epoch_of(shell: Shell, graphs: Mock | None = None) -> SyncEpoch:
    positions = EpochPositions(
        list("x" * STEPS * BATCH), BatchSizes(((BATCH, STEPS),)), 0, None
    )
    double, hooks = cast(Any, shell), hooks_without_run()
    if graphs is not None:
        cast(Any, hooks.observer).graphs = graphs
    shell.epoch = SyncEpoch(double, double, positions, double, 1, hooks)
    return shell.epoch


def test_an_epoch_that_is_left_before_a_pass_takes_no_part_in_the_next_one() -> None:
    # Once it took, and lost, a message of the next epoch: all waited for ever.
    shell = Shell()
    shell.inbox.clear()  # one grant, so that no report is due
    shell.inbox.extend([grant(0, 3), RankLeft(rank=0, epoch=0, gone=1, passes=0)])
    batches = epoch_of(shell).batches()
    next(batches)
    shell.backward()
    next(batches)
    assert shell.on_backward is not None
    batches.close()
    assert shell.epoch
    assert shell.epoch.end
    assert shell.on_backward is None


def said_by_the_shell(
    *, has_backward: bool = True, is_early: bool = False
) -> list[str]:
    """What a rank of the real shell does, in order: its loop's bodies and messages."""
    shell, graphs = Shell(), Mock(open_batches=[])
    epoch = epoch_of(shell, graphs if is_early else None)
    for number, _ in enumerate(epoch.batches()):
        shell.log.append(f"forward {number}")
        if has_backward:
            shell.backward()  # of the batch before, if this one was asked for early
        graphs.open_batches = [shell.part]
        shell.log.append(f"end {number}")
    return [entry for entry in shell.log if entry != "wait"]


def said_by_the_simulator(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The same of a simulated rank by itself, with the steps' time as a unit."""
    run = SimulatedRun(policy="sync", samples=STEPS * BATCH, batch_size=BATCH)
    device = Device(seconds_per_sample=1.0 / BATCH)
    link = Link(latency_s=0.0, bytes_per_s=1e12)
    sim = Simulation(Cluster(run=run, devices=(device,), link=link), Watch(books=Books))
    said: list[tuple[str, float]] = []
    send = sim.send

    def note(event: Event) -> None:
        if isinstance(event, StepsDone):
            said.append((f"report {event.start}", sim.engine.now_s))
        send(event)

    monkeypatch.setattr(sim, "send", note)
    sim.run()
    return said


@pytest.mark.parametrize(
    ("has_backward", "is_early"), [(True, False), (False, False), (True, True)]
)
def test_the_shell_reports_beneath_the_next_step(
    has_backward: bool, is_early: bool
) -> None:
    """Or at its end, where it has no backward pass; a step later if that is late."""
    expected = ["forward 0", "end 0"]
    lag = 1 + is_early
    for number in range(1, STEPS):
        later = [f"report {number - lag}"] * (number >= lag) + [f"end {number}"]
        expected += [f"forward {number}", *(later if has_backward else later[::-1])]
    expected += [f"report {number}" for number in range(STEPS - lag, STEPS)]
    said = said_by_the_shell(has_backward=has_backward, is_early=is_early)
    assert said == expected


def test_the_simulator_reports_beneath_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of the next step is over when its backward pass begins."""
    said = said_by_the_simulator(monkeypatch)
    assert [name for name, _ in said] == [
        entry for entry in said_by_the_shell() if entry.startswith("report")
    ]
    ends_s = [number + 1.0 for number in range(STEPS)]
    on_backward = [end_s + 1 / 3 for end_s in ends_s[:-1]]
    assert [at_s for _, at_s in said] == pytest.approx([*on_backward, ends_s[-1]])
