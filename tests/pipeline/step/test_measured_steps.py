"""Times of steps: deadlines, and the log line of a plan that would be faster."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.planning import make_plan
from elche.pipeline.step.measured_steps import LOOK_EVERY, MeasuredSteps
from elche.schedule.costs import StageCost
from elche.schedule.generators.schedules import make_schedule
from elche.schedule.planning.layer_costs import LayerCosts, stage_costs
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import furthest
from tests.pipeline.cases.pipeline_times_cases import slowed

LAYERS, MICRO_BATCHES = 8, 4
ADVISES = "a new plan would be"


def profiled_layers(memory: tuple[float, ...] = ()) -> LayerCosts:
    one = StageCost(forward=1, input_gradient=1, weight_gradient=1, activation=1)
    return LayerCosts(by_rank=((one,) * LAYERS,) * 2, memory=memory)


def times_of(
    schedule: Any = "1f1b",
    profiled: LayerCosts | None = None,
    says: bool = True,
    **options: Any,
) -> MeasuredSteps:
    config = PipelineConfig(**options)
    plan = make_plan(schedule, MICRO_BATCHES, 2, LAYERS, config)
    return MeasuredSteps(schedule, plan, config, profiled, says)


def run(steps: MeasuredSteps, count: int, *seconds: float) -> int:
    """Steps whose stages take so long for each of F, I and W; how many were timed."""
    timed = 0
    for _ in range(count):
        is_due = steps.is_due()
        steps.ended()
        if is_due:
            rows = [[stage, one, 0.0, one, one] for stage, one in enumerate(seconds)]
            steps.take([rows], ends_s=0.5)
            timed += 1
    return timed


def test_three_steps_are_timed_behind_the_first_and_then_one_in_twenty() -> None:
    steps = times_of()
    assert run(steps, 2, 1.0, 1.0) == 0
    assert steps.step_s is None
    assert run(steps, 3, 1.0, 1.0) == 3
    # 1F1B of two stages: (4 + 1) x 3 s, and 0.5 s before and after.
    assert steps.step_s == pytest.approx(15.5)
    assert run(steps, LOOK_EVERY, 1.0, 1.0) == 1


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "resume it with partition=[6, 2]"),
        ({"schedule": "auto", "stages_per_rank": 1}, 'with costs="measure" and sample'),
        ({"profiled": profiled_layers()}, 'resume it with costs="measure" and sample='),
    ],
)
def test_a_faster_plan_is_logged_once(
    options: dict[str, Any], remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = times_of(**options)
    with caplog.at_level(logging.INFO):
        run(steps, 5, 1.0, 1.0)
        assert caplog.messages == []
        run(steps, 4 * LOOK_EVERY, 1.0, 3.0)
    (told,) = caplog.messages
    assert told.startswith(ADVISES)
    assert "[6, 2] layers on the stages instead of [4, 4]" in told
    assert told.endswith(remedy if remedy.endswith("]") else 'measure" and sample=')
    assert remedy in told
    percent, best_s, kept_s = (
        float(one)
        for one in re.findall(r"be (\d+) %.*take ([\d.]+) s .* of ([\d.]+) s;", told)[0]
    )
    assert percent == pytest.approx(100 * (kept_s / best_s - 1), abs=0.6)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"says": False}, (1.0, 3.0)),
        ({}, (1.0, 1.2)),
        ({"partition": (6, 2)}, (1.5, 1.5)),
        ({"profiled": profiled_layers((4.5, 4.5))}, (1.0, 3.0)),
    ],
)
def test_nothing_is_logged(
    options: dict[str, Any],
    seconds: tuple[float, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By another rank, of little drift, of a good plan, for want of memory."""
    with caplog.at_level(logging.INFO):
        run(times_of(**options), 4 * LOOK_EVERY, *seconds)
    assert caplog.messages == []


def test_a_schedule_that_was_given_gets_no_advice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    costs = stage_costs(profiled_layers(), (0, 1), (4, 4))
    with caplog.at_level(logging.INFO):
        run(times_of(make_schedule("1f1b", costs, MICRO_BATCHES)), 50, 1.0, 3.0)
    assert caplog.messages == []


@pytest.mark.distributed
def test_training_goes_on_under_the_plan_that_the_log_names(ranks2: RankPool) -> None:
    first, second = ranks2.run(slowed, [(4, 4), (6, 2)], 6, case_setup=serve_in_thread)
    (told,) = first[2]
    assert ADVISES in told
    assert "partition=[6, 2]" in told
    assert second[2] == [], "one rank says it, and not of the new plan"
    assert first[1] == second[1] == [(4, 4)] * 6 + [(6, 2)] * 6
    whole, partitions, _ = ranks2.run(slowed, [(4, 4)], 12, case_setup=serve_in_thread)[
        0
    ]
    assert partitions == [(4, 4)] * 12, "no layer moves by itself"
    assert furthest(first[0], whole) <= 1e-12
