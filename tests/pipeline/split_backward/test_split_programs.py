"""The split backward of what programs do inside a stage, beside a plain backward."""

from __future__ import annotations

import copy
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
from elche.pipeline.split_backward.backward import StageBackward
from tests.pipeline.split_backward.test_split_backward import (
    check_equal,
    cotangent,
    forward,
    near,
    runner_for,
    split,
)

_TORCH_LINEAR = F.linear


class Refilled(nn.Linear):
    """Gives its weight other memory, with other values, in each forward."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("base", torch.randn(6, 6))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.base * input.detach().abs().mean()
        return super().forward(input)


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


class UnderAMode(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with Quantised():
            return super().forward(input)


class WithTangent(nn.Linear):
    """Forward-mode differentiation inside."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(input, torch.ones_like(input))
            primal, tangent = forward_ad.unpack_dual(super().forward(dual))
            assert tangent is not None
            return primal + tangent


class MatrixBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


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
    "a function mode": lambda: UnderAMode(6, 5),
    "forward-mode differentiation": lambda: WithTangent(6, 5),
    "a bias for each row": MatrixBias,
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


def test_gradients_that_are_there_keep_the_shape_of_a_row_bias() -> None:
    module = MatrixBias().double()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(4, 6).double()
    split(runner_for(module), [x])
    assert module.bias.grad is not None
    near(module.bias.grad, cotangent(x), "bias")


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


def test_a_loss_that_differentiates_the_output_is_refused() -> None:
    runner = runner_for(nn.Linear(6, 5))
    runner.begin_step()
    value = forward(runner, 0, torch.randn(4, 6))
    loss = value.square().sum()
    (gradient,) = torch.autograd.grad(loss, value, retain_graph=True)
    loss = loss / (gradient.norm() + 1)
    runner.keep(0, loss)
    with pytest.raises(ConfigError, match="the loss function does"):
        runner.backward_input(0, [torch.ones_like(loss)])


def test_a_hook_that_differentiates_is_refused() -> None:
    class Equilibrium(nn.Linear):
        """The usual backward of a fixed point."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            start = input.detach().requires_grad_()
            step = torch.tanh(super().forward(start))
            found = super().forward(input)

            def solve(grad: torch.Tensor) -> torch.Tensor:
                for _ in range(3):
                    (pulled,) = torch.autograd.grad(
                        step, start, grad, retain_graph=True
                    )
                    grad = grad + pulled
                return grad

            found.register_hook(solve)
            return found

    runner: StageBackward = runner_for(Equilibrium(6, 6))
    runner.begin_step()
    value = forward(runner, 0, torch.randn(4, 6))
    runner.keep(0, value)
    with pytest.raises(ConfigError, match="differentiates"):
        runner.backward_input(0, [torch.ones_like(value)])
