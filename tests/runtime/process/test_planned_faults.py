"""Planned runs whose data hold a sample that gives no number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.distributed.cases.tasks import Task, identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.runtime.windows.cases.lost_cases import Survived, train_through_bad_samples

pytestmark = pytest.mark.distributed

BAD = 17
TASK = Task(samples=400, batch_size=8, epochs=1, optimizer="adamw", shuffle=False)


def run(pool: RankPool, speeds: tuple[float, ...], **options: Any) -> list[Survived]:
    environment = [
        {"ELCHE_SPEED": str(speed), "ELCHE_MS_PER_SAMPLE": "0.2"} for speed in speeds
    ]
    task = dataclasses.replace(TASK, options={"seed": 5, **options})
    return pool.run(
        train_through_bad_samples,
        task,
        (BAD,),
        "plain",
        case_setup=serve_in_thread,
        env=environment,
    )


def check_discarded(ranks: list[Survived]) -> None:
    """Once, and every sample was trained on once."""
    assert sorted(n for rank in ranks for n in rank.order) == list(range(TASK.samples))
    assert sum(len(rank.discarded) for rank in ranks) == 1
    metrics = ranks[0].metrics
    assert metrics is not None
    discarded = sum(metrics.discarded_samples)
    assert discarded == TASK.samples - metrics.samples >= TASK.batch_size // 2
    for rank in ranks:
        assert all(torch.isfinite(value).all() for value in rank.values.values())


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_deterministic_run_keeps_to_its_plan(ranks2: RankPool, policy: str) -> None:
    """What it discards depends on no time."""
    options = {"policy": policy, "anchor": 3, "speed_hints": (1.0, 0.5)}
    runs = [
        run(ranks2, speeds, deterministic=True, **options)
        for speeds in ((1.0, 0.5), (0.5, 1.0))
    ]
    for ranks in runs:
        check_discarded(ranks)
        assert ranks[0].order == runs[0][0].order
        for before, after in zip(runs[0], ranks, strict=True):
            assert identical([before.values, after.values])
