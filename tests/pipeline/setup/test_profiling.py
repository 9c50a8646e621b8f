"""Layers are measured as they run, and the slow rank gets fewer of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elche.comm.transport.messages import Message
from elche.errors import ConfigError, MismatchError
from elche.pipeline.pipeline import Pipeline
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.building import layers_of
from elche.pipeline.setup.measured_plan import memory_limit, plan_measured
from elche.pipeline.setup.profiling import BUDGET_S, LayerMeasurement, profile_layers
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.stage import Layer, Stage
from elche.runtime.emulation import EmulationConfig
from elche.runtime.process.environment import Placement
from elche.schedule.costs import PipelineCosts
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import Recurrent as Waiting
from tests.pipeline.setup.cases.profiling_cases import (
    BYTES_PER_S,
    DELAY_S,
    LAYERS,
    SLOW_RANK,
    WIDTH,
    Clock,
    Emulated,
    Recurrent,
    SplitsDearly,
    batch,
    layers_with,
    left_out,
    linked,
    mixed_layers,
    profiled,
    unsplit,
    virtual_time,
)

CPU = torch.device("cpu")


def profiled_of(layers: Any, sample: Any, device: torch.device = CPU) -> Any:
    return profile_layers(layers_of(layers, None), sample, device)


def test_each_part_of_a_layer_is_timed() -> None:
    layers = [Emulated(0.02).double(), Emulated(0.0).double()]
    with virtual_time():
        slow, fast = profiled_of(layers, batch()[0], CPU)
    assert slow.forward_s == pytest.approx(0.02)
    assert slow.input_gradient_s == pytest.approx(0.02)
    assert slow.weight_gradient_s < 1e-6
    assert fast.forward_s < 1e-6


@pytest.mark.parametrize("seconds", [0.002, 0.05, 0.3, 2.0])
def test_measuring_takes_its_budget_and_one_microbatch(seconds: float) -> None:
    reports: list[str] = []
    layers = layers_of([Emulated(seconds).double() for _ in range(12)], None)
    with virtual_time():
        begin_s = Clock.now_s
        found = profile_layers(layers, batch()[0], CPU, None, reports.append)
        took_s = Clock.now_s - begin_s
    assert found[0].forward_s == pytest.approx(seconds)
    assert all(one == found[0] for one in found), "of one kind"
    assert took_s <= min(BUDGET_S, 256 * seconds) + 26 * seconds + 1e-9
    assert any(one.startswith("7 of 12 layers, ") for one in reports)
    assert reports[-1] == "", "the report has ended"


@pytest.mark.parametrize("quota", [0.1, 0.4, 1.0])
def test_a_quota_slows_all_layers_alike(quota: float) -> None:
    """Most layers run within one period; the waits fall on few of their runs.

    Reports of progress wait for the coordinator, which is no wait of a layer.
    """
    seconds = [0.001 * (1 + at % 4) for at in range(12)]
    layers = layers_of([Emulated(s).double() for s in seconds], None)
    with virtual_time(quota):
        report = lambda _: Clock.sleep(0.0)  # noqa: E731
        found = profile_layers(layers, batch()[0], CPU, None, report)
    scales = [one.forward_s / s for one, s in zip(found, seconds, strict=True)]
    assert scales == pytest.approx([scales[0]] * 12, rel=1e-6)
    assert scales[0] == pytest.approx(1 / quota, rel=0.1)


def test_a_coarse_cpu_clock_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "thread_time", lambda: round(Clock.cpu_s, 2))
    with virtual_time():
        (one,) = profiled_of([Emulated(0.001).double()], batch()[0])
    assert one.forward_s == pytest.approx(0.001)


class Sleeping(Emulated):
    """A layer that waits of its own accord."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            Clock.sleep(0.01)
        return super().forward(x)


def test_the_waits_of_a_layer_that_sleeps_count() -> None:
    layers = [Emulated(0.01).double(), Sleeping(0.001).double()]
    with virtual_time():
        computing, sleeping = profiled_of(layers, batch()[0])
    assert computing.forward_s == pytest.approx(0.01)
    assert sleeping.forward_s == pytest.approx(0.021)
    assert sleeping.input_gradient_s == pytest.approx(0.001)


def test_layers_of_one_structure_and_other_times_are_told_apart() -> None:
    layers = [Emulated(s).double() for s in (0.01, 0.02, 0.01, 0.02, 0.0105)]
    with virtual_time():
        found = profiled_of(layers, batch()[0], CPU)
    expected = [0.01, 0.02, 0.01, 0.02, 0.01]
    assert [one.forward_s for one in found] == pytest.approx(expected)


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("make", [Recurrent, partial(Waiting, nn.GRU), parametrized])
def test_what_cannot_be_put_off_has_no_weight_gradient(
    make: Callable[[], nn.Module],
) -> None:
    (found,) = profiled_of([make()], torch.randn(4, WIDTH), CPU)
    assert found.weight_gradient_s == 0.0
    assert found.input_gradient_s == found.backward_s > 0.0


@pytest.mark.parametrize(("share", "is_split"), [(0.2, False), (0.01, True)])
def test_a_layer_whose_split_costs_too_much_is_not_split(
    share: float, is_split: bool
) -> None:
    layers = [SplitsDearly(0.01, share * 0.01)]
    with virtual_time():
        (found,) = profiled_of(layers, torch.randn(4, WIDTH), CPU)
    assert (found.weight_gradient_s > 0.0) == is_split
    more = 1 + share * is_split
    assert found.forward_s == pytest.approx(0.01 * more, rel=1e-4)
    assert found.input_gradient_s == pytest.approx(0.01 * more, rel=1e-4)
    assert found.backward_s == pytest.approx(0.01, rel=1e-4)


@pytest.mark.distributed
def test_layers_run_as_they_were_planned(ranks2: RankPool) -> None:
    gradients, seen = {}, {}
    for each, by_layer in ranks2.run(unsplit, case_setup=serve_in_thread):
        gradients |= each
        seen |= by_layer
    assert seen == {"0": True, "2": False, "3": True, "5": False, "6": True}
    model = nn.Sequential(*mixed_layers())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    for name, one in model.named_parameters():
        assert one.grad is not None
        assert (gradients[name] - one.grad).norm() <= 1e-12 * one.grad.norm()


def test_bytes_are_those_of_the_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    linear, tanh = profiled_of(model, torch.randn(3, 4), CPU)
    assert linear.parameter_bytes == 4 * (4 * 8 + 8)
    assert linear.output_bytes == tanh.output_bytes == 4 * 3 * 8
    assert linear.activation_bytes == 4 * 3 * 4
    assert tanh.activation_bytes == 4 * 3 * 8
    assert tanh.parameter_bytes == 0


def test_layers_that_begin_in_place_are_measured() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    rows = profiled_of(layers, torch.randn(3, 4), torch.device("cpu"))
    assert [one.output_bytes for one in rows] == [48, 48, 24]


def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: one.clone() for name, one in model.state_dict().items()}
    random = torch.get_rng_state()
    profiled_of(model, torch.ones(3, 4), CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(one.grad is None for one in model.parameters())
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name])


def test_factories_and_meta_layers_are_measured_without_the_model() -> None:
    with torch.device("meta"):
        meta = nn.Linear(4, 2)
    layers = [lambda: nn.Embedding(5, 4), meta]
    found = profiled_of(layers, torch.tensor([[1, 2], [3, 4]]), CPU)
    assert [one.parameter_bytes for one in found] == [80, 40]
    assert meta.weight.is_meta


def measured(seconds: float) -> LayerMeasurement:
    return LayerMeasurement(
        forward_s=seconds,
        input_gradient_s=seconds,
        weight_gradient_s=seconds,
        activation_bytes=8,
        output_bytes=8,
        parameter_bytes=8,
    )


def plan(slow: float, layers: int = 9, limit: float = math.inf) -> PipelineConfig:
    told = [[measured(t)] * layers for t in (1.0, slow)]
    return plan_measured(told, [math.inf, limit], "1f1b", 8, PipelineConfig())[1]


def layers_by_rank(config: PipelineConfig) -> dict[int, int]:
    assert config.partition is not None
    assert not isinstance(config.costs, str)
    assert config.costs is not None
    return dict(zip(config.costs.placement, config.partition, strict=True))


def test_the_plan_follows_the_times() -> None:
    assert layers_by_rank(plan(slow=2.0)) == {0: 6, 1: 3}


def test_stages_avoid_a_slow_link() -> None:
    rows, links = [[measured(1.0)] * 9] * 3, [(0, 1, 0.0, 1e9), (1, 2, 0.0, 1e9)]
    for slow in ((0, 2, 5.0, 1e9), (0, 2, 0.0, 1.6)):
        made, config = plan_measured(
            *(rows, [math.inf] * 3, "1f1b", 8, PipelineConfig(), [*links, slow])
        )
        assert made.placement[1] == 1
        assert isinstance(config.costs, PipelineCosts)
        assert max(config.costs.links) < 1e-6


@pytest.mark.distributed
def test_links_between_hosts_are_measured(ranks3: RankPool) -> None:
    found = ranks3.run(linked, case_setup=serve_in_thread)
    assert [[link[:2] for link in each] for each in found] == [
        *([(0, 1), (0, 2)], [(1, 2)], [])
    ]
    for _, _, latency_s, bytes_per_s in found[0] + found[1]:
        assert latency_s >= DELAY_S
        assert 0 < bytes_per_s <= 1.5 * BYTES_PER_S


@pytest.mark.distributed
def test_emulated_speeds_are_measured(ranks2: RankPool) -> None:
    speeds = [{"ELCHE_SPEED": one, "ELCHE_MS_PER_SAMPLE": "99"} for one in ("1", ".25")]
    case = profiled, "1f1b", 8, True
    found = ranks2.run(*case, env=speeds, case_setup=serve_in_thread)
    assert [one.layers for one in found] == [8, 2]


@pytest.mark.parametrize(
    ("layers", "is_split", "expected"),
    [
        ([nn.Linear(WIDTH, WIDTH)], True, (1, 1, 1)),
        ([nn.Linear(WIDTH, WIDTH)], False, (1, 2, 0)),
        ([Recurrent()], True, (1, 2, 0)),
        ([nn.Linear(WIDTH, WIDTH), nn.Tanh()], True, (2, 3, 1)),
    ],
)
def test_a_stage_takes_its_emulated_time(
    layers: list[nn.Module], is_split: bool, expected: tuple[int, int, int]
) -> None:
    named = [Layer(str(place), one) for place, one in enumerate(layers)]
    stage = Stage(0, named, False, unsplit=[1])
    emulation = EmulationConfig(speed=0.25, ms_per_sample=300.0).for_layer(4)
    given = Message((torch.randn(5, WIDTH),), ["t"], (True,))
    with virtual_time():
        runner = StageBackward(stage, None, emulation=emulation)
        runner.begin_step()
        times_s = [Clock.now_s]
        message = runner.keep(0, runner.forward(0, given, {}, is_split))
        times_s.append(Clock.now_s)
        runner.backward_input(0, list(message.tensors))
        times_s.append(Clock.now_s)
        runner.backward_weight(0)
        times_s.append(Clock.now_s)
    took_s = [end - begin for begin, end in pairwise(times_s)]
    assert took_s == pytest.approx([0.5 * part for part in expected])


def test_the_plan_stays_within_the_memory() -> None:
    """A layer takes 32 bytes with its state, and 8 for each microbatch in flight."""
    assert layers_by_rank(plan(slow=0.5))[1] > 4
    config = plan(slow=0.5, limit=170.0)
    assert layers_by_rank(config)[1] <= 4
    assert isinstance(config.costs, PipelineCosts)
    assert math.isinf(config.costs.memory[0])
    assert config.costs.memory[1] < 170.0
    assert layers_by_rank(plan(slow=0.5, limit=30.0)) == {0: 9}


def test_the_memory_of_a_rank() -> None:
    layers = layers_of([nn.Linear(3, 4)], None)
    place = Placement(rank=1, world_size=2, device=CPU)
    assert math.isinf(memory_limit(PipelineConfig(), place, CPU, layers))
    given = PipelineConfig(costs="measure", memory_bytes=(5, 7))
    assert memory_limit(given, place, CPU, layers) == 7.0
    with pytest.raises(ConfigError, match="memory_bytes for each of 3 ranks"):
        memory_limit(given, replace(place, world_size=3), CPU, layers)


@pytest.mark.parametrize("limits", [(0.0, 1.0), 8, "12"])
def test_memory_that_is_none_is_refused(limits: Any) -> None:
    with pytest.raises(ConfigError, match="bytes above 0 for each rank"):
        PipelineConfig(costs="measure", memory_bytes=limits)
    with pytest.raises(ConfigError, match='memory_bytes= is for costs="measure"'):
        PipelineConfig(memory_bytes=limits)


def test_ranks_with_other_layers_are_refused() -> None:
    one = measured(1.0)
    told = [[one] * 3, [one] * 4]
    with pytest.raises(MismatchError, match=r"numbers of layers: \[3, 4\]"):
        plan_measured(told, [math.inf] * len(told), "1f1b", 2, PipelineConfig())


def test_a_rank_that_lengthens_the_step_has_no_layers() -> None:
    assert layers_by_rank(plan(slow=1.0, layers=1)) in ({0: 1}, {1: 1})
    config = plan(slow=100.0)
    assert layers_by_rank(config) == {0: 9}
    assert isinstance(config.costs, PipelineCosts)
    assert config.costs.num_ranks == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs sample="),
        ({"sample": batch()[0], "partition": (10,)}, "leave partition out"),
        ({"sample": batch()[0], "schedule": "a.csv"}, "needs the name of a schedule"),
        ({"costs": "guess"}, "costs of the stages or 'measure', got 'guess'"),
    ],
)
def test_settings_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline(
            layers_with(0.0),
            F.mse_loss,
            micro_batches=2,
            **{"costs": "measure", **options},
        )


@pytest.mark.distributed
def test_a_rank_without_layers_trains_and_saves_with_the_others(
    ranks2: RankPool,
) -> None:
    model = nn.Sequential(*layers_with(0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    first, second = ranks2.run(left_out, case_setup=serve_in_thread)
    assert (first.layers, second.layers) == (LAYERS, 0)
    assert second.warned == []
    assert "ranks [1] have no layers and idle" in first.warned[0]
    for name, one in model.state_dict().items():
        assert (first.state[name] - one).norm() <= 1e-12 * one.norm()
        assert torch.equal(first.state[name], second.state[name])
    assert first.loss == second.loss


def expected() -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and loss of one process."""
    model = nn.Sequential(*layers_with(0.0))
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: one.grad for name, one in model.named_parameters()}
    return {name: one for name, one in found.items() if one is not None}, loss.item()


def test_one_process_measures_too() -> None:
    x, y = batch()
    pipe = Pipeline(
        layers_with(0.0), F.mse_loss, micro_batches=4, costs="measure", sample=x[:2]
    )
    assert pipe.step(x, y).loss == pytest.approx(expected()[1], rel=1e-12)
    assert sum(pipe.partition) == LAYERS


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_the_slow_rank_gets_fewer_layers(ranks2: RankPool, schedule: str) -> None:
    found = ranks2.run(profiled, schedule, case_setup=serve_in_thread)
    slow, fast = found[SLOW_RANK], found[1 - SLOW_RANK]
    assert slow.partition == fast.partition
    assert slow.layers + fast.layers == LAYERS
    assert 1 <= slow.layers <= LAYERS // 2 - 1
    gradients, loss = expected()
    together = {**slow.gradients, **fast.gradients}
    assert together.keys() == gradients.keys()
    for name, one in gradients.items():
        assert (together[name] - one).norm() <= 1e-12 * one.norm()
    assert slow.loss == fast.loss == pytest.approx(loss, rel=1e-12)
