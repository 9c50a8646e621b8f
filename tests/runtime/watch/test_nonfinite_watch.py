"""Gradients that are no numbers, and steps that a GradScaler skips, seen at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.errors import ConfigError
from elche.runtime.report.scalars import Readback, ScalarLog
from elche.runtime.watch import nonfinite_watch
from elche.runtime.watch.nonfinite_watch import NonFiniteWatch
from elche.runtime.watch.scaler_watch import NAME, ScalerWatch

NAN = float("nan")


class Slow(Readback):
    """A copy that has come when the test says so."""

    come = False

    def is_done(self) -> bool:
        return self.come


def model_of(kind: str) -> list[nn.Parameter]:
    """Parameters of which the second is looked at, but where all are large."""
    if kind == "large":
        return [nn.Parameter(torch.ones(100, 100)), nn.Parameter(torch.ones(5000))]
    dtype = {"half": torch.float16, "complex": torch.complex64}.get(kind)
    others = nn.Parameter(torch.full((5000,), NAN)), nn.Parameter(torch.ones(0))
    return [others[0], nn.Parameter(torch.ones(4, dtype=dtype)), others[1]]


@pytest.mark.parametrize("kind", ["plain", "large", "half", "complex"])
@pytest.mark.parametrize("defers", [False, True])
def test_what_is_none_is_told_in_order(
    kind: str, defers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, parameters = NonFiniteRecord(), model_of(kind)
    watch = NonFiniteWatch(parameters, numbers)
    used = parameters[0] if kind == "large" else parameters[1]
    came = dict.fromkeys([0] if kind == "large" else [2, 1, 0], 1)
    monkeypatch.setattr(nonfinite_watch, "Readback", Slow)
    monkeypatch.setattr(Slow, "come", not defers)

    def step(number: int, value: float) -> None:
        used.grad = torch.full_like(used, value)
        watch.look((2, number, 0, 4), came)
        watch.report(final=False)

    # In half precision a sum of large gradients overflows where none of them does.
    step(0, 60000.0)
    step(1, NAN)
    step(2, 1.0)
    step(3, float("inf"))
    with torch.no_grad():
        used.fill_(NAN)
    step(4, NAN)
    assert (numbers.broken, numbers.is_finite) == (
        ((), True) if defers else ((2, 3, 0, 0, 4), False)
    )
    monkeypatch.setattr(Slow, "come", True)
    watch.report(final=False)
    assert (numbers.broken, numbers.is_finite) == ((2, 3, 0, 0, 4), False)


def test_a_part_that_does_not_count_is_not_looked_at() -> None:
    numbers, (parameter,) = NonFiniteRecord(), [nn.Parameter(torch.ones(2))]
    watch = NonFiniteWatch([parameter], numbers)
    parameter.grad = torch.full((2,), NAN)
    watch.look((), {0: 1})
    watch.report(final=True)
    assert (numbers.broken, numbers.is_finite) == ((), True)


def test_passes_of_a_step_and_parts_of_a_model_are_told_apart() -> None:
    numbers, parameters = (
        NonFiniteRecord(),
        [nn.Parameter(torch.ones(2)) for _ in range(4)],
    )
    watch = NonFiniteWatch(parameters, numbers)

    def look(step: int, came: list[int], values: list[float]) -> None:
        for index, value in zip(came, values, strict=True):
            parameters[index].grad = torch.full((2,), value)
        watch.look((2, step, 0, 4), dict.fromkeys(came, 1))
        watch.report(final=True)

    look(5, [1, 0], [1.0, 1.0])
    look(5, [3, 2], [1.0, NAN])
    assert numbers.broken == (2, 5, 1, 0, 4)
    look(6, [1, 0], [NAN, 1.0])
    assert numbers.broken == (2, 5, 1, 0, 4)
    look(6, [3, 2], [1.0, 1.0])
    assert numbers.broken == (2, 6, 0, 0, 4)
    look(7, [1, 0], [1.0, 1.0])
    assert (numbers.broken, numbers.is_finite) == ((), True)
    with torch.no_grad():
        parameters[1].fill_(NAN)
    watch.report(final=False)  # no pass came since
    assert not numbers.is_finite


BAD = (False, True, False, False, True, True)


def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    """A loop whose gradients overflow now and then; the weights after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = []
    for is_bad in BAD:
        loss = model(torch.ones(1, 2)).sum() * (float("inf") if is_bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(next(model.parameters()).detach().clone())
    return weights


def made(*, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_counted(fused: bool) -> None:
    """Of this optimizer, while it is watched; every step is what it was."""
    (model, optimizer), log = made(fused=fused), ScalarLog()
    expected = train(*reversed(made(fused=fused)))
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    watch.attach()
    copied, other = copy.deepcopy(optimizer), nn.Linear(2, 2)
    copied.param_groups[0]["params"] = list(other.parameters())
    train(copied, other)
    weights = train(optimizer, model)
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    assert log.drain(final=True) == ((NAME, 3.0, 6.0),)
    assert watch.has_scaler
    watch.detach()
    watch.detach()
    train(optimizer, model)
    assert log.drain(final=True) == ()


def test_without_a_scaler_nothing_is_logged() -> None:
    (model, optimizer), log = made(fused=True), ScalarLog()
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert log.drain(final=True) == ()
    assert not watch.has_scaler


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_refused_where_gradients_are_summed(fused: bool) -> None:
    model, optimizer = made(fused=fused)
    is_refused = [False, True]
    watch = ScalerWatch(optimizer, ScalarLog())
    watch.attach(is_refused.pop)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(ConfigError, match="a GradScaler cannot step where gradients"):
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert watch.has_scaler
