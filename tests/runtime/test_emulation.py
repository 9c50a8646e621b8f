"""Emulated devices: declared time per sample, unchanged gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elche.errors import ConfigError
from elche.runtime import emulation
from elche.runtime.emulation import EmulationConfig, emulate

SAMPLES = 16
MS_PER_SAMPLE = 0.5
STEP_S = SAMPLES * MS_PER_SAMPLE / 1e3


class Clock:
    """Stands in for the module ``time``: nothing but sleep takes any."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(emulation, "time", found)
    return found


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)),
        nn.Linear(32, 4),
    )


def train_step(model: nn.Module, samples: int = SAMPLES) -> None:
    model(torch.ones(samples, 32)).sum().backward()


def fast_config(speed: float = 1.0) -> EmulationConfig:
    return EmulationConfig(speed=speed, ms_per_sample=MS_PER_SAMPLE)


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_a_pass_has_a_fixed_time_whatever_the_speed(clock: Clock, speed: float) -> None:
    model = make_model()
    handle = emulate(
        model, EmulationConfig(speed=speed, ms_per_sample=0.5, fixed_ms=3.0)
    )
    first, second = (model(torch.ones(SAMPLES, 32)).sum() for _ in range(2))
    (first + second).backward()  # two micro-batches, two passes
    assert clock.now_s == pytest.approx(2 * (3e-3 + STEP_S / speed))
    assert handle.nominal_s == pytest.approx(clock.now_s)


def test_gradients_appear_spread_over_the_backward_pass(clock: Clock) -> None:
    model = make_model()
    emulate(model, fast_config())
    appeared_s: list[float] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: appeared_s.append(clock.now_s)
        )
    loss = model(torch.ones(SAMPLES, 32)).sum()
    begin_s, budget_s = clock.now_s, 2 / 3 * STEP_S
    assert begin_s == pytest.approx(STEP_S / 3)
    loss.backward()
    parts = [(index + 1) / len(appeared_s) for index in range(len(appeared_s))]
    assert appeared_s == pytest.approx([begin_s + part * budget_s for part in parts])


def test_evaluation_runs_at_real_speed() -> None:
    model = make_model()
    handle = emulate(model, EmulationConfig(speed=1e-6))
    x = torch.ones(SAMPLES, 32)
    model.eval()
    model(x).sum().backward()
    model.train()
    with torch.no_grad():
        model(x)
    assert handle.nominal_s == 0.0


def test_a_backward_pays_for_every_forward_it_goes_through() -> None:
    model = make_model()
    handle = emulate(model, fast_config())
    halves = torch.ones(SAMPLES, 32).chunk(2)
    begin_s = time.perf_counter()
    sum(model(x).sum() for x in halves).backward()  # type: ignore[union-attr]
    assert time.perf_counter() - begin_s >= STEP_S
    assert handle.nominal_s == pytest.approx(STEP_S)
    model(halves[0])  # dropped: no later backward pays for it
    train_step(model)
    assert handle.nominal_s == pytest.approx(2 * STEP_S)
    assert handle.steps == 2


def test_an_opaque_output_is_paid_in_the_forward_pass(clock: Clock) -> None:
    class Opaque(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return lambda: y

    model = Opaque(32, 4)
    emulate(model, fast_config())
    model(torch.ones(SAMPLES, 32))().sum().backward()
    assert clock.now_s == pytest.approx(STEP_S)


def test_a_failed_backward_does_not_disturb_the_next(clock: Clock) -> None:
    model = make_model()
    handle = emulate(model, fast_config())

    def fail(_: Tensor) -> None:
        raise RuntimeError("broken on purpose")

    hook = next(model.parameters()).register_hook(fail)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        train_step(model)
    hook.remove()
    begin_s = clock.now_s
    train_step(model)
    assert clock.now_s - begin_s == pytest.approx(STEP_S)
    assert handle.steps == 1


def test_a_compiled_model_is_compiled_once() -> None:
    """Its hooks are none of the graph; they counted, so each step had another one."""
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    model = make_model()
    handle = emulate(model, EmulationConfig(speed=1e6))
    fast = torch.compile(model, backend=backend)
    for _ in range(4):
        train_step(fast)
    assert len(compiled) == 1
    assert handle.steps == 4


def test_overruns_are_counted() -> None:
    model = make_model()
    handle = emulate(model, EmulationConfig(speed=1e6))
    train_step(model)
    assert handle.steps == 1
    assert handle.overrun_s > 0


def test_compute_within_the_declared_time_is_no_overrun(clock: Clock) -> None:
    model = make_model()
    handle = emulate(model, EmulationConfig(speed=0.1))
    train_step(model)
    assert handle.overrun_s == 0.0
    assert clock.now_s == pytest.approx(SAMPLES * 1.25e-2)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "fast", True])
def test_speeds_and_times_must_be_positive_and_finite(bad: Any) -> None:
    with pytest.raises(ConfigError, match="speed of an emulated device to be"):
        EmulationConfig(speed=bad)
    with pytest.raises(ConfigError, match="ms_per_sample of an emulated device"):
        EmulationConfig(speed=1.0, ms_per_sample=bad)
    if bad != 0.0:
        with pytest.raises(ConfigError, match="fixed_ms of an emulated device"):
            EmulationConfig(speed=1.0, fixed_ms=bad)


def test_what_cannot_be_emulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="got ReLU without any"):
        emulate(nn.ReLU(), fast_config())
    with pytest.raises(ConfigError, match="parameters on meta"):
        emulate(nn.Linear(2, 2, device="meta"), fast_config())
    model = nn.Bilinear(1, 1, 1)
    emulate(model, fast_config())
    with pytest.raises(ConfigError, match="leading dimension of the first tensor"):
        model(1.0, torch.tensor(2.0))
