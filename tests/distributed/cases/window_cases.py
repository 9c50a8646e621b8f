"""Cases of the window policies that need more than a plain task."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import elche
from elche.comm.transport.process_group import Group
from elche.runtime.epochs import epoch_opening
from elche.runtime.report.notifications import RunNotifications
from elche.session.process import current_run
from tests.distributed.cases.tasks import (
    Task,
    Trace,
    begin,
    build,
    shared,
    state_of,
    take_step,
)
from tests.distributed.virtual_clock import virtual_clock
from tests.harness.settings import nested


def shared_over_slow_link(task: Task, sync_s: float) -> tuple[Trace, str]:
    """The task where the link was probed to be slow; also what was said.

    Samples take what they take by a clock that only they move, on rank 1 four times as
    long as on rank 0.
    """
    said: list[str] = []
    probe = epoch_opening.probe_reduction_s
    sample_s = (0.0002, 0.0008)[int(os.environ["RANK"])]

    def slow(group: Group, numel: int) -> float:
        probe(group, numel)
        return sync_s

    def spend() -> None:
        run = current_run()
        assert run is not None
        clock.advance(sample_s * run.current_samples)

    epoch_opening.probe_reduction_s = slow
    try:
        with virtual_clock() as clock:
            trace = shared_and_heard(task, said, spend)
    finally:
        epoch_opening.probe_reduction_s = probe
    return trace, "\n".join(said)


def shared_and_heard(
    task: Task, said: list[str], at_step: Callable[[], None] = lambda: None
) -> Trace:
    """The task, with what the run says to people."""
    handle = RunNotifications.handle

    def listen(notifications: Any, report: Any) -> None:
        notifications.emit = said.append
        handle(notifications, report)

    RunNotifications.handle = listen  # type: ignore[method-assign]
    try:
        return shared(task, at_step)
    finally:
        RunNotifications.handle = handle  # type: ignore[method-assign]


class SlowToLoad(Dataset[Any]):
    """Samples of which a batch takes a while to load."""

    def __init__(
        self, length: int, load_s: float, spend: Callable[[float], None]
    ) -> None:
        self._length = length
        self._load_s = load_s
        self._spend = spend

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        self._spend(self._load_s * len(indices))
        return [torch.full((4,), float(index % 7)) for index in indices]


def share_with_slow_loader(policy: str, load_s: Sequence[float]) -> tuple[float, float]:
    """This rank's share of the last epoch, and its delivered seconds per sample."""
    rank = int(os.environ["RANK"])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with virtual_clock() as clock:
        dataset = SlowToLoad(480, load_s[rank], clock.advance)
        model, optimizer, loader = elche.setup(
            model, optimizer, DataLoader(dataset, batch_size=8), policy=policy
        )
        for _ in range(2):
            for x in loader:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    run = current_run()
    assert run is not None
    last = run.notifications.epoch_metrics[-1]
    share, sample_s = last.shares[rank], last.busy_s[rank] / last.rank_samples[rank]
    elche.shutdown()
    return share, sample_s


def shared_by_virtual_speeds(task: Task, batch_s: Sequence[float]) -> Trace:
    """The task where a batch takes every rank so long, on any machine."""
    with virtual_clock() as clock:
        spent_s = batch_s[int(os.environ["RANK"])]
        return shared(task, lambda: clock.advance(spent_s))


def follow_progress_with_gradient_windows(epochs: int) -> dict[str, torch.Tensor]:
    """Gradient windows with BatchNorm, and a learning rate that follows progress."""
    task = Task(samples=320, batch_size=8, epochs=epochs, model="norm")
    options = {"policy": "cadence", "update": "gradients", "anchor": 4}
    model, optimizer, loader = begin(task, **options)
    schedule = elche.ProgressLR(optimizer, lambda done: 1.0 - 0.9 * done, 320 * epochs)
    for _ in range(epochs):
        for x, y, *_ in loader:
            take_step(model, optimizer, x, y)
            schedule.step()
    state = state_of(model)
    elche.shutdown()
    return state


def trained_by(policy: str, reduction: str) -> dict[str, torch.Tensor]:
    """Parameters after two epochs, at the same step length for sum and mean."""
    task = Task(samples=96, batch_size=8)
    model, _, loader = build(task)
    rate = 0.1 / (task.batch_size if reduction == "sum" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    options = {"policy": policy, "deterministic": True, "max_anchor": 0}
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, loss_reduction=reduction, **nested(options)
    )
    for _ in range(2):
        for x, y, *_ in loader:
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
            optimizer.zero_grad()
    elche.shutdown()
    return state_of(model)
