"""Cases of the window policies that need more than a plain task."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

import elche
from elche.comm.transport.process_group import Group
from elche.runtime.epochs import epoch_opening
from elche.runtime.report.notifications import RunNotifications
from elche.session.process import current_run
from tests.distributed.cases.tasks import (
    Task,
    Trace,
    build,
    shared,
    state_of,
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

    def listen(notifications: Any, report: Any) -> None:
        notifications.emit = said.append
        handle(notifications, report)

    handle = RunNotifications.handle
    with (
        patch.object(epoch_opening, "probe_reduction_s", slow),
        patch.object(RunNotifications, "handle", listen),
        virtual_clock() as clock,
    ):
        trace = shared(task, spend)
    return trace, "\n".join(said)


def shared_by_virtual_speeds(task: Task, batch_s: Sequence[float]) -> Trace:
    """The task where a batch takes every rank so long, on any machine."""
    with virtual_clock() as clock:
        spent_s = batch_s[int(os.environ["RANK"])]
        return shared(task, lambda: clock.advance(spent_s))


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
