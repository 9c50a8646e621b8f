"""`benchmarks.pipeline`: settings, plan, and a short real run."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from benchmarks.pipeline import contender
from benchmarks.pipeline.bench import Measured, measured_of, table_lines
from benchmarks.pipeline.contender import EmulatedStage
from benchmarks.pipeline.plan import (
    CONTENDERS,
    PipelineBenchConfig,
    make_bench_plan,
    whole_layer_ideal_s,
)
from elche.errors import ConfigError
from elche.schedule.timing import simulate

THREE_TIMES_SLOWER = (1.0, 1.0, 1.0, 1 / 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speeds": (1.0,)}, "two --speeds or more"),
        ({"speeds": (1.0, -1.0)}, "expected positive --speeds"),
        ({"layers": 7}, "at least 8 --layers"),
        ({"microbatches": 6}, "a multiple of 4 devices"),
        ({"microbatches": 0}, "a multiple of 4 devices"),
        ({"repetitions": 0}, "--repetitions of at least 1"),
        ({"schedule": "zb-9"}, "expected --schedule among"),
        ({"ms_per_layer": 0.0}, "positive ms_per_layer"),
        ({"memory_layers": -1.0}, "--memory-layers of at least 0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineBenchConfig(**{"speeds": THREE_TIMES_SLOWER, **settings})


def test_settings_travel_as_text() -> None:
    config = PipelineBenchConfig(speeds=(1.0, 0.5), layers=5, memory_layers=7.0)
    assert PipelineBenchConfig.from_json(config.to_json()) == config


def test_whole_layers_divide_as_well_as_can_be() -> None:
    config = PipelineBenchConfig(speeds=THREE_TIMES_SLOWER, ms_per_layer=2.0)
    # 8, 7 and 7 layers on the fast ones, 2 on the slow one
    assert whole_layer_ideal_s(config) == pytest.approx(3 * 16 * 8 * 2e-3)


def test_torch_is_split_by_hand_as_speeds_allow() -> None:
    config = PipelineBenchConfig(speeds=THREE_TIMES_SLOWER)
    assert config.split_by_hand((0, 1, 2, 3)) == (8, 7, 7, 2)
    assert config.split_by_hand((0, 1, 2, 3, 0, 1, 2, 3)) == (4, 4, 4, 1, 4, 3, 3, 1)
    assert config.split_by_hand((0, 1, 2, 3, 3, 2, 1, 0)) == (4, 4, 4, 1, 1, 3, 3, 4)


def test_the_plan_reaches_the_goal_on_declared_times() -> None:
    config = PipelineBenchConfig(speeds=THREE_TIMES_SLOWER, memory_layers=0)
    plan = make_bench_plan(config)
    assert plan.predicted_s <= 1.12 * plan.partition_ideal_s
    assert simulate(plan.schedule, plan.costs).makespan == pytest.approx(
        plan.predicted_s
    )


def test_the_plan_keeps_to_the_memory_of_an_equal_split() -> None:
    plan = make_bench_plan(PipelineBenchConfig(speeds=THREE_TIMES_SLOWER))
    assert max(plan.peak_layers) <= 24


def test_a_makespan_goes_from_the_first_call_to_the_last() -> None:
    step = {"overrun_s": 0.0}
    first = {"begin_s": 10.0, "end_s": 13.0, "busy_s": 3.0, **step}
    second = {"begin_s": 11.0, "end_s": 14.0, "busy_s": 2.0, **step}
    found = measured_of([{"elche": [first]}, {"elche": [second]}], "elche")
    assert found == Measured(
        makespans_s=(4.0,), bubbles=(0.25,), idles=(0.375,), overrun_share=0.0
    )


def test_an_emulated_stage_takes_the_declared_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        """Nothing but sleep takes any time."""

        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

        def sleep(self, seconds: float) -> None:
            self.now_s += seconds

    monkeypatch.setattr(contender, "time", Clock())

    class Stage:
        def work(self, value: int) -> int:
            return value + 1

    stage, emulated = Stage(), EmulatedStage()
    emulated.around(stage, {"work": lambda value: value / 1000})
    assert stage.work(20) == 21
    [(begin_s, end_s)] = emulated.spans
    assert (begin_s, end_s) == pytest.approx((0.0, 0.02))
    assert emulated.overrun_s == 0.0
    emulated.around(stage, {"work": lambda value: 0.0})
    stage.work(5)
    assert emulated.overrun_s == pytest.approx(0.005)


def test_the_table_has_each_contender_and_the_prediction() -> None:
    config = PipelineBenchConfig(speeds=(1.0, 0.5), layers=8, microbatches=4)
    plan = make_bench_plan(config)
    one = Measured(makespans_s=(2.0,), bubbles=(0.25,), idles=(0.4,), overrun_share=0.0)
    text = "\n".join(table_lines(config, plan, dict.fromkeys(CONTENDERS, one)))
    for name in CONTENDERS:
        assert name in text
    assert f"{2.0 / plan.ideal_s:.3f}" in text
    assert f"predicted from declared times {plan.predicted_s:.3f} s" in text


TOO_OLD = version("torch").startswith(("2.9.", "2.10."))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(TOO_OLD, reason="torch's own ZB-V does not run over gloo")
def test_all_contenders_run() -> None:
    settings = "--speeds 1,0.5 --layers 6 --microbatches 4 --ms-per-layer 2"
    command = [sys.executable, "-m", "benchmarks.pipeline", *settings.split()]
    ended = subprocess.run(
        [*command, "--repetitions", "1"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("contender"))
    rows = [line.rsplit(maxsplit=6) for line in lines[head + 1 :][: len(CONTENDERS)]]
    assert [row[0] for row in rows] == [*CONTENDERS]
    for _, _, _, mean_idle, busiest_idle, _, over_whole_layer_ideal in rows:
        assert 0.0 <= float(busiest_idle) <= float(mean_idle) < 1.0
        assert float(over_whole_layer_ideal) >= 1.0
