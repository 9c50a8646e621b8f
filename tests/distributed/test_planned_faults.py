"""Planned runs whose data hold a sample that gives no number."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from elche.runtime.coordinator import serve_in_thread
from tests.distributed.cases import Task, identical, label_sum
from tests.distributed.window_cases import POISON, Poisoned, train_on_poison
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

BATCH = 8
TASK = Task(samples=400, batch_size=BATCH, epochs=1, optimizer="adamw", shuffle=False)


def run(pool: RankPool, speeds: tuple[float, ...], **options: Any) -> list[Poisoned]:
    environment = [
        {"ELCHE_SPEED": str(speed), "ELCHE_MS_PER_SAMPLE": "0.2"} for speed in speeds
    ]
    task = dataclasses.replace(
        TASK, options={"seed": 5, "non_finite": "leave_out", **options}
    )
    return pool.run(train_on_poison, task, case_setup=serve_in_thread, env=environment)


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_replay_tries_and_leaves_out_what_the_recorded_run_did(
    ranks2: RankPool, policy: str, weighs: bool, tmp_path: Path
) -> None:
    record = str(tmp_path / "plan.json")
    options: dict[str, Any] = {"policy": policy, "anchor": 3, "max_anchor": 3}
    if weighs:
        options |= {"weight_of": label_sum, "drift_weights": "samples"}
    first = run(ranks2, (1.0, 0.5), record=record, **options)
    again = run(ranks2, (0.4, 1.0), replay=record, **options)
    assert [rank.order for rank in again] == [rank.order for rank in first]
    assert [rank.left_out for rank in again] == [rank.left_out for rank in first]
    assert first[0].left_out == [((POISON // BATCH, POISON // BATCH + 1),)]
    assert identical([first[0].state, *(rank.state for rank in again)])
    assert sum(rank.order.count(POISON) for rank in again) == 2


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_deterministic_run_tries_again_after_its_plan(
    ranks2: RankPool, policy: str, tmp_path: Path
) -> None:
    """What it rejects depends on no time, nor does when that is tried again."""
    record = str(tmp_path / "plan.json")
    options = {"policy": policy, "anchor": 3, "speed_hints": (1.0, 0.5)}
    fixed = {**options, "deterministic": True}
    runs = [
        run(ranks2, (1.0, 0.5), record=record, **fixed),
        run(ranks2, (0.5, 1.0), **fixed),
        run(ranks2, (0.5, 1.0), replay=record, **options),
    ]
    for ranks in runs:
        assert ranks[0].left_out == [((POISON // BATCH, POISON // BATCH + 1),)]
        assert ranks[0].metrics.samples == TASK.samples - BATCH
        seen = [index for rank in ranks for index in rank.order]
        assert set(seen) == set(range(TASK.samples))
        assert seen.count(POISON) == 2
    assert identical([rank.state for ranks in runs for rank in ranks])
    state = runs[0][0].state
    assert all(torch.isfinite(value).all() for value in state.values())
