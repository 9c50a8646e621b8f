"""A pipeline lets go of a batch when its step ends, without Python's collector."""

from __future__ import annotations

import pytest

from elche.schedule.generators.schedules import FIXED_SCHEDULES
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import MODELS, Work
from tests.pipeline.cases.pipeline_memory_cases import left_over

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("schedule", FIXED_SCHEDULES)
@pytest.mark.every(2)
def test_two_ranks_keep_nothing(ranks2: RankPool, schedule: str) -> None:
    work = Work(model="gpt", schedule=schedule)
    assert ranks2.run(left_over, work, case_setup=serve_in_thread) == [[], []]


@pytest.mark.parametrize("model", MODELS)
def test_a_split_backward_keeps_nothing_of_any_model(model: str) -> None:
    assert left_over(Work(model=model, schedule="zb-h1")) == []


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_replicas_keep_nothing(ranks2: RankPool, schedule: str) -> None:
    work = Work(model="gpt", schedule=schedule, options={"replicas": 2})
    assert ranks2.run(left_over, work, case_setup=serve_in_thread) == [[], []]
