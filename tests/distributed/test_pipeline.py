"""Pipelines on real processes train as one process does."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elche.runtime.coordinator import serve_in_thread
from elche.schedule.schedules import FIXED_SCHEDULES
from tests.distributed.pipeline_cases import (
    MODELS,
    Work,
    furthest,
    gradients,
    piped,
    plain,
    torch_gradients,
)
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

SCHEDULES = (*FIXED_SCHEDULES, "auto")


def _check(pool: RankPool | None, work: Work) -> None:
    expected = plain(work)
    if pool is None:
        found = [piped(work)]
    else:
        found = pool.run(piped, work, case_setup=serve_in_thread)
    assert furthest(found[0].state, expected.state) <= 1e-12
    for one in found:
        assert one.losses == pytest.approx(expected.losses, rel=1e-12)
        assert one.norm == pytest.approx(expected.norm, rel=1e-12)
        if expected.evaluated is not None:
            assert one.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
    gradient = found[0].input_gradient
    if expected.input_gradient is None:
        assert gradient is None
    else:
        assert gradient is not None
        away = (gradient - expected.input_gradient).norm()
        assert away <= 1e-12 * expected.input_gradient.norm()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_every_schedule_on_four_ranks(
    ranks4: RankPool, schedule: str, model: str
) -> None:
    micro_batches = 4 if schedule.startswith("interleaved") else 5
    _check(ranks4, Work(model=model, schedule=schedule, micro_batches=micro_batches))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_two_ranks(ranks2: RankPool, schedule: str) -> None:
    _check(ranks2, Work(model="gpt", schedule=schedule))


PAIRS = [
    (model, ("zb-h1", "zb-v", "interleaved-zb", "1f1b")[number % 4])
    for number, model in enumerate(MODELS)
]


@pytest.mark.parametrize(("model", "schedule"), PAIRS)
def test_every_model_on_two_ranks(ranks2: RankPool, model: str, schedule: str) -> None:
    _check(ranks2, Work(model=model, schedule=schedule))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_in_one_process(model: str) -> None:
    options = {"stages_per_rank": 4}
    _check(None, Work(model=model, schedule="interleaved-zb", options=options))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_and_model(
    ranks2: RankPool, ranks4: RankPool, model: str, schedule: str
) -> None:
    for pool in (ranks2, ranks4):
        _check(pool, Work(model=model, schedule=schedule, micro_batches=4))


ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_the_example_ends_with_the_loss_of_one_process() -> None:
    script = "examples/pipeline.py"
    commands = (
        (sys.executable, script),
        (sys.executable, "-m", "elche.cli", "run", "--nproc", "4", script),
    )
    shown = []
    for command in commands:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT
        )
        assert ended.returncode == 0, ended.stderr
        shown.append(re.findall(r"loss ([\d.]+)", ended.stdout))
    assert len(shown[0]) == 4
    assert [float(one) for one in shown[1]] == pytest.approx(
        [float(one) for one in shown[0]], abs=2e-4
    )
    assert float(shown[0][-1]) < 0.7 * float(shown[0][0])


def test_a_frozen_first_stage_where_torch_loses_gradients(ranks2: RankPool) -> None:
    """torch 2.13: the second stage gets no gradient, and nothing is said."""
    work = Work(model="frozen-first", schedule="interleaved-zb")
    _check(ranks2, work)
    with tempfile.TemporaryDirectory() as folder:
        found = ranks2.run(torch_gradients, work, f"{folder}/store")
    expected = gradients(work)
    missing = [
        name
        for rank in found
        for name, gradient in rank.items()
        if gradient is None and expected[name] is not None
    ]
    assert missing, "torch has mended it; this test has served its purpose"
