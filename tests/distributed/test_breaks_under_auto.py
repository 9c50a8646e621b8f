"""A loop is left early under `auto`, before and after it has chosen windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import elche
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.session.process import current_run
from tests.distributed.cases.tasks import (
    Task,
    begin,
    error_of,
    identical,
    state_of,
    take_step,
)
from tests.harness.choices import wanted as wanted
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

SAMPLES, BATCH = 480, 8


@dataclass
class Found:
    """What a rank saw and holds."""

    error: str = ""
    orders: list[list[int]] = field(default_factory=list)
    metrics: list[elche.monitor.EpochMetrics] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    switched: bool = False
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def leave(when: str, who: tuple[int, ...]) -> Found:
    """Two epochs, the first left early by some ranks; asks for the metrics of both."""
    found = Found()
    found.error = error_of(_train, found, when, who)
    return found


def _train(found: Found, when: str, who: tuple[int, ...]) -> None:
    task = Task(samples=SAMPLES, batch_size=BATCH)
    model, optimizer, loader = begin(task, policy="auto", timeout_s=60.0)
    run = current_run()
    assert run is not None
    for epoch in range(2):
        order: list[int] = []
        in_windows = 0
        for x, y, index, _ in loader:
            if run.current_samples:
                order += index.tolist()
            take_step(model, optimizer, x, y)
            elche.log_scalar("seen", 1.0)
            in_windows += isinstance(run.epochs.under_way, WindowEpoch)
            found.switched |= in_windows > 0
            due = len(order) >= BATCH if when == "before" else in_windows == 2
            if epoch == 0 and elche.rank() in who and due:
                break
        found.orders.append(order)
        found.metrics.append(elche.epoch_metrics())
        found.progress.append(elche.progress_samples())
    found.state = state_of(model)


@pytest.mark.parametrize(
    ("policy", "when", "who"),
    [
        *(
            (policy, "after", who)
            for policy in ("async", "cadence")
            for who in ((0,), (1,), (0, 1))
        ),
        # Before the switch to windows, or while it is on its way.
        *(("async", "before", who) for who in ((0,), (1,), (0, 1))),
    ],
)
@pytest.mark.every(4)
def test_an_epoch_that_is_left_is_told_as_it_was_trained(
    ranks2: RankPool,
    wanted: Callable[..., None],
    policy: str,
    when: str,
    who: tuple[int, ...],
) -> None:
    """And ends for all; the next one is whole."""
    wanted((policy, ()), steps=1)
    ranks = ranks2.serve(leave, when, who)
    assert [rank.error for rank in ranks] == ["", ""]
    assert identical([rank.state for rank in ranks])
    first = ranks[0]
    assert [rank.metrics for rank in ranks] == [first.metrics] * len(ranks)
    assert [rank.progress for rank in ranks] == [first.progress] * len(ranks)
    counts = []
    for epoch in range(2):
        seen = [index for rank in ranks for index in rank.orders[epoch]]
        assert len(seen) == len(set(seen)) == first.metrics[epoch].samples
        assert first.metrics[epoch].scalars == {"seen": pytest.approx(1.0)}
        counts.append(len(seen))
    assert counts[0] < counts[1] == SAMPLES
    assert first.progress == [counts[0], counts[0] + counts[1]]
    assert all(rank.switched for rank in ranks)
