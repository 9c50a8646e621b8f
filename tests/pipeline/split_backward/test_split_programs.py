"""The split backward of what programs do inside a stage, beside a plain backward."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from elche.errors import ConfigError
from elche.pipeline.pipeline import Pipeline
from tests.pipeline.split_backward.split_cases import with_bias
from tests.pipeline.split_backward.test_split_backward import (
    check_equal,
    forward,
    near,
    runner_for,
    split,
)

_TORCH_LINEAR = F.linear


class Refilled(nn.Module):
    """Gives its weight other memory, with other values, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("base", torch.randn(6, 6))

    def forward(self, input: torch.Tensor) -> Any:
        self.layer.weight.data = self.base * input.detach().abs().mean()
        return self.layer(input)


class HookedInside(nn.Module):
    """A hook on an output that is made again by a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def _hooked(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(x)
        if made.requires_grad:
            made.register_hook(lambda grad: 2 * grad)
        return made

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._hooked, self.first(x), use_reentrant=True)


class Quantised(TorchFunctionMode):
    """Sees the weights of linear layers."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _TORCH_LINEAR:
            args = (args[0], _scaled(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


class UnderAMode(nn.Sequential):
    def forward(self, input: torch.Tensor) -> Any:
        with Quantised():
            return super().forward(input)


class OnDevice(nn.Sequential):
    """With a default device, which is a function mode, too."""

    def forward(self, input: torch.Tensor) -> Any:
        with torch.device("meta"):
            return super().forward(input)


class WithTangent(nn.Sequential):
    """Forward-mode differentiation inside."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(input, torch.ones_like(input))
            primal, tangent = forward_ad.unpack_dual(super().forward(dual))
            assert tangent is not None
            return primal + tangent


class PerSample(nn.Sequential):
    """A call for each sample, by functorch."""

    def forward(self, input: torch.Tensor) -> Any:
        return torch.func.vmap(super().forward)(input)


class Force(nn.Sequential):
    """The gradient of a part, as a constant."""

    def forward(self, input: torch.Tensor) -> Any:
        energy = super().forward(input)
        if not input.requires_grad:
            return energy
        (force,) = torch.autograd.grad(energy.sum(), input, retain_graph=True)
        return energy + force


class Swapped(nn.Sequential):
    """A call with other weights."""

    def forward(self, input: torch.Tensor) -> Any:
        doubled = {name: 2 * one for name, one in self[0].named_parameters()}
        return torch.func.functional_call(self[0], doubled, (input,)) + self[0](input)


class Target(nn.Module):
    """Copies a part of itself in its first forward (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(6, 6)
        self.copies: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> Any:
        if not self.copies:
            self.copies.append(copy.deepcopy(self.online).requires_grad_(False))
        return self.online(x) - self.copies[0](x)


def _scaled(weight: torch.Tensor) -> torch.Tensor:
    return weight * weight.abs().mean()


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "other memory for a weight": Refilled,
    "a hook inside a checkpoint": HookedInside,
    "a function mode": lambda: UnderAMode(nn.Linear(6, 5)),
    "forward-mode differentiation": lambda: WithTangent(nn.Linear(6, 5)),
    "functorch": lambda: PerSample(nn.Linear(6, 5)),
    "a gradient inside": lambda: Force(nn.Linear(6, 6)),
    "other weights": lambda: Swapped(nn.Linear(6, 5)),
    "a bias for each row": lambda: with_bias(4, 4),
    "a copy of a part": Target,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forward_ad scripts
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_plain_backward(name: str) -> None:
    torch.manual_seed(1)
    module = PROGRAMS[name]().double()
    module(torch.randn(4, 6).double())  # what a first forward changes is behind
    batches = [torch.randn(4, 6).double() for _ in range(2)]
    check_equal(module, runner_for(module), batches)


def test_a_default_device_keeps_nothing_from_being_deferred() -> None:
    module = OnDevice(nn.Linear(6, 5)).double()
    batches = [torch.randn(4, 6).double() for _ in range(2)]
    assert check_equal(module, runner_for(module), batches) == set()


def test_the_log_names_what_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    layers = [nn.Linear(6, 6), Refilled(), nn.Bilinear(6, 6, 3), nn.LayerNorm(3)]
    layers[2].forward = lambda x: nn.Bilinear.forward(layers[2], x, x)  # type: ignore[method-assign]
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    options: dict[str, Any] = {"micro_batches": 2}
    with caplog.at_level(logging.INFO):
        Pipeline(layers, F.mse_loss, schedule="1f1b", **options).step(x, y)
        assert caplog.messages == []
        Pipeline(layers, F.mse_loss, schedule="zb-h1", **options).step(x, y)
    (message,) = caplog.messages
    assert message.startswith("the backward of 2 (Bilinear) runs whole: no weight")


def test_a_copy_made_in_a_forward_keeps_its_own_weights() -> None:
    module = Target().double()
    x = torch.randn(4, 6).double()
    split(runner_for(module), [x])
    with torch.no_grad():
        for parameter in module.online.parameters():
            parameter.add_(1.0)
    assert (module.online(x) - module.copies[0](x)).abs().min() > 0.0


def test_a_patched_linear_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def patched(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return _TORCH_LINEAR(x, _scaled(w), b)

    monkeypatch.setattr(F, "linear", patched)
    module = nn.Linear(6, 5).double()
    batches = [torch.randn(4, 6).double() for _ in range(2)]
    check_equal(module, runner_for(module), batches)
    assert len(calls) == 4  # once for each forward, plain and split


def test_gradients_that_a_hook_takes_away_are_counted() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).double()
    batches = [torch.randn(4, 6).double() for _ in range(3)]
    check_equal(module, runner_for(module), batches)
    expected = [one.grad for one in module.parameters()]
    main = [torch.zeros_like(one) for one in module.parameters()]
    runner = runner_for(module)
    for parameter, total in zip(module.parameters(), main, strict=True):
        parameter.grad = None

        def take(one: torch.Tensor, total: torch.Tensor = total) -> None:
            assert one.grad is not None
            total.add_(one.grad)
            one.grad = None

        parameter.register_post_accumulate_grad_hook(take)
    split(runner, batches)
    for parameter, total, value in zip(
        module.parameters(), main, expected, strict=True
    ):
        got = total if parameter.grad is None else total + parameter.grad
        near(got, value, "taken")


def test_a_loss_that_differentiates_the_stage_is_refused() -> None:
    runner = runner_for(nn.Linear(6, 5))
    runner.begin_step()
    value = forward(runner, 0, torch.randn(4, 6))
    with pytest.raises(ConfigError, match="the loss function does"):
        value.square().sum().backward()
