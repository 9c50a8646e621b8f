"""Learning rate schedules of a loop in windows, where ranks run unlike many batches."""

from __future__ import annotations

import logging

import pytest
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR

import elche
from elche.runtime.process.coordinator import serve_in_thread
from tests.distributed.cases.tasks import Task, build
from tests.harness.rank_pool import RankPool
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

WINDOWS = {"policy": "cadence", "deterministic": True, "max_anchor": 2}


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _warnings(task: Task, schedule: str) -> list[str]:
    """What was warned of in two epochs with this schedule."""
    heard, logger = _Heard(), logging.getLogger("elche.runtime.watch.rate_watch")
    logger.addHandler(heard)
    model, optimizer, loader = build(task)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, **nested(task.options)
    )
    torchs = StepLR(optimizer, 1, gamma=0.9)
    if schedule == "progress":
        ours = elche.ProgressLR(optimizer, lambda done: 1 - done, 2 * task.samples)
    for _ in range(2):
        for x, y, _, _ in loader:
            if schedule == "progress":
                ours.step()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule == "batch":
                torchs.step()
        if schedule == "epoch":
            torchs.step()
    elche.shutdown()
    logger.removeHandler(heard)
    return heard.lines


@pytest.mark.parametrize("update", ["parameters", "gradients"])
def test_a_rate_that_moves_in_windows_is_warned_of_once(
    ranks2: RankPool, update: str
) -> None:
    task = Task(samples=64, batch_size=8, options={**WINDOWS, "update": update})
    first, second = ranks2.run(_warnings, task, "batch", case_setup=serve_in_thread)
    assert len(first) == 1
    assert "elche.ProgressLR" in first[0]
    assert "policy 'cadence'" in first[0]
    assert second == []


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("epoch", WINDOWS), ("progress", WINDOWS), ("batch", {})],
    ids=["between epochs", "by progress", "default policy"],
)
def test_rates_that_are_the_same_on_all_ranks_are_not_warned_of(
    ranks2: RankPool, schedule: str, options: dict[str, object]
) -> None:
    """The default policy reduces every batch: a schedule per batch is right there."""
    task = Task(samples=64, batch_size=8, options=options)
    found = ranks2.run(_warnings, task, schedule, case_setup=serve_in_thread)
    assert found == [[], []]
