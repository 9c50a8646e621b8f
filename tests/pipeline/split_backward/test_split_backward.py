"""I and W together give what one plain backward gives, for any layer."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elche.comm.transport.messages import Message
from elche.errors import ConfigError
from elche.pipeline.split_backward import split_modules
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.split_backward.guard import ContributionGuard
from elche.pipeline.stage import Layer, OwnBackward, Stage, named_parameters
from tests.pipeline.split_backward.split_cases import (
    DEFERRED,
    IMMEDIATE,
    MIXED,
    Over,
    hooked_accumulation,
)


def runner_for(module: nn.Module, guarded: bool = True) -> StageBackward:
    stage = Stage(0, [Layer("", module)], unpacks=True)
    learning = {n: p for n, p in module.named_parameters() if p.requires_grad}
    guard = ContributionGuard(0, learning, "test") if guarded else None
    return StageBackward(stage, guard)


def forward(runner: StageBackward, microbatch: int, x: torch.Tensor) -> torch.Tensor:
    needs = x.is_floating_point()
    given = Message((x,), ["t"], (needs,))
    return runner.forward(microbatch, given, {}, is_split=True)


def split(runner: StageBackward, batches: list[torch.Tensor]) -> list[Any]:
    """Gradients of the inputs, with all microbatches in flight at once."""
    return split_early(runner, batches)[0]


def split_early(
    runner: StageBackward, batches: list[torch.Tensor]
) -> tuple[list[Any], set[str]]:
    """Likewise, and the parameters that have a gradient before any W has run.

    W comes in another order than I.
    """
    runner.begin_step()
    gradients = []
    for number, x in enumerate(batches):
        torch.manual_seed(number)
        value = forward(runner, number, x)
        runner.keep(number, value)
        gradients.append(cotangent(value))
    found = [
        runner.backward_input(number, [gradients[number]])
        for number in range(len(batches))
    ]
    named = named_parameters(runner.stage.layers).items()
    early = {name for name, one in named if one.grad is not None}
    for number in reversed(range(len(batches))):
        runner.backward_weight(number)
    runner.end_step()
    return [one[0] if one else None for one in found], early


def plain(module: nn.Module, batches: list[torch.Tensor]) -> list[Any]:
    found = []
    for number, x in enumerate(batches):
        torch.manual_seed(number)
        x = x.detach().clone()
        x.requires_grad_(x.is_floating_point())
        value = module(x)
        value.backward(cotangent(value))
        found.append(x.grad)
    return found


def cotangent(value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(value.numel())
    return torch.randn(value.shape, generator=generator).to(value.dtype)


def test_hooks_on_accumulation_run_once_per_microbatch() -> None:
    module = hooked_accumulation("register_hook")
    runner = runner_for(module)
    split(runner, [torch.randn(3, 6).double() for _ in range(2)])
    split(runner, [torch.randn(3, 6).double()])
    assert module.seen == [1, 1, 1]


def test_hooks_are_found_where_torch_does_not_number_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_modules, "RemovableHandle", object)
    module = nn.Linear(6, 4).double()
    runner = runner_for(module)
    batches = [torch.randn(rows, 6).double() for rows in (5, 3)]
    assert check_equal(module, runner, batches) == set()
    module.weight.register_hook(lambda grad: grad * 3)
    assert check_equal(module, runner, batches) == {"weight", "bias"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [*DEFERRED, *IMMEDIATE])
def test_gradients_are_those_of_plain_backward(name: str) -> None:
    torch.manual_seed(1)
    module = (DEFERRED | IMMEDIATE)[name]().double()
    runner = runner_for(module)
    batches = [torch.randn(rows, 6).double() for rows in (5, 3, 5)]
    early = check_equal(module, runner, batches)
    if name in DEFERRED:
        assert early == set()
    else:
        learning = named_parameters(runner.stage.layers).items()
        assert early == {n for n, one in learning if one.requires_grad}
        assert runner.deferred == 0


@pytest.mark.parametrize("name", MIXED)
def test_parameters_that_are_not_deferred_everywhere(name: str) -> None:
    torch.manual_seed(1)
    make, expected = MIXED[name]
    module = make().double()
    batches = [torch.randn(rows, 6).double() for rows in (5, 3)]
    runner = runner_for(module)
    assert check_equal(module, runner, batches) == expected
    assert runner.deferred > 0


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(5, 3),
        nn.Embedding(5, 3, padding_idx=2),
        nn.Embedding(5, 3, scale_grad_by_freq=True),
    ],
    ids=["plain", "padded", "scaled"],
)
def test_embedding(module: nn.Module) -> None:
    runner = runner_for(module.double())
    tokens = torch.arange(12).reshape(3, 4) % 5
    assert check_equal(module, runner, [tokens, tokens[:2]]) == set()


def check_equal(
    module: nn.Module, runner: StageBackward, batches: list[torch.Tensor]
) -> set[str]:
    """Compares with plain backward; returns the parameters that did not wait for W."""
    for one in module.parameters():
        one.grad = None
    expected_inputs = plain(module, batches)
    expected = {name: one.grad for name, one in module.named_parameters()}
    for one in module.parameters():
        one.grad = None
    inputs, early = split_early(runner, batches)
    for name, one in module.named_parameters():
        near(one.grad, expected[name], name)
    for number, (mine, other) in enumerate(zip(inputs, expected_inputs, strict=True)):
        near(mine, other, f"input {number}")
    return early


def near(a: torch.Tensor | None, b: torch.Tensor | None, name: str) -> None:
    assert (a is None) == (b is None), name
    if a is not None and b is not None:
        assert (a - b).norm() <= 1e-12 * b.norm(), name


def test_autocast_rounds_as_plain_backward_does() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    runner = runner_for(module)
    batches = [torch.randn(8, 6) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        plain_inputs = plain(module, batches)
        expected = [one.grad for one in module.parameters()]
        for one in module.parameters():
            one.grad = None
        inputs, early = split_early(runner, batches)
    for one, other in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, other, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inputs, plain_inputs)
    assert early == set()


@pytest.mark.parametrize("of", ["input", "weight"])
def test_a_stage_that_differentiates_inside_is_told_the_way_out(of: str) -> None:
    def penalised(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        y = layer(x)
        asked = x if of == "input" else layer.weight
        (inner,) = torch.autograd.grad(y.sum(), asked, create_graph=of == "input")
        return y + inner.sum()

    runner = runner_for(Over(penalised, nn.Linear(6, 4)))
    runner.begin_step()
    with pytest.raises(ConfigError, match="split_backward=False"):
        forward(runner, 0, torch.randn(2, 6))


def test_an_input_changed_in_place_is_found_as_autograd_does() -> None:
    kept: list[torch.Tensor] = []

    def spoilt(x: torch.Tensor, layer: nn.Module) -> Any:
        kept.append(x * 1)
        return layer(kept[-1])

    runner = runner_for(Over(spoilt, nn.Linear(6, 4)))
    runner.begin_step()
    for number in range(2):
        runner.keep(number, forward(runner, number, torch.randn(2, 6)))
    kept[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        runner.backward_input(0, [torch.ones(2, 4)])
    runner.backward_input(1, [torch.ones(2, 4)])
    kept[1].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        runner.backward_weight(1)


def test_an_input_is_copied_for_layers_that_share_a_name() -> None:
    # As of split=lambda model: [model[1], Wrapped(model[0])], both named "1".
    layers = [Layer("1", nn.ReLU(inplace=True)), Layer("1", nn.Linear(6, 4))]
    runner = StageBackward(Stage(0, layers, unpacks=False), None)
    runner.begin_step()
    given = torch.randn(2, 6)
    runner.keep(0, forward(runner, 0, given.clone().requires_grad_()))
    (found,) = runner.backward_input(0, [torch.ones(2, 4)])
    assert found is not None
    assert torch.equal(found == 0, given <= 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_no_input_of_the_layers_inside(reentrant: bool) -> None:
    inner: list[Any] = []

    def keep(_: nn.Module, __: Any, made: torch.Tensor) -> None:
        inner.append(weakref.ref(made.untyped_storage()))

    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    module[1].register_forward_hook(keep)

    def outer(x: torch.Tensor, inner: nn.Module) -> Any:
        return checkpoint(inner, x * 2, use_reentrant=reentrant)

    runner = runner_for(Over(outer, module))
    runner.begin_step()
    runner.keep(0, forward(runner, 0, torch.randn(2, 6)))
    assert [one() for one in inner] == [None]


def test_modules_are_as_before_after_a_forward_that_fails() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    module = nn.Sequential(nn.Linear(6, 6), nn.MultiheadAttention(6, 2), Over(fail))
    before = [dict(vars(one)) for one in module.modules()]
    runner = runner_for(nn.Sequential(*module[0:1], module[2]))
    runner.begin_step()
    with pytest.raises(ValueError, match="no"):
        forward(runner, 0, torch.randn(2, 6))
    assert [dict(vars(one)) for one in module.modules()] == before
    assert all(type(one) is nn.Parameter for one in module.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_block_defers_all_but_its_norms(training: bool) -> None:
    torch.manual_seed(1)
    block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    runner = runner_for(block.train(training))
    batches = [torch.randn(rows, 5, 8).double() for rows in (3, 2)]
    early = check_equal(block, runner, batches)
    assert early == {n for n, _ in block.named_parameters() if n.startswith("norm")}


class Own(OwnBackward):
    """A linear layer that splits its backward itself, or forgets to."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.kept: dict[int, Any] = {}
        self.forgets = forgets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[self.current_microbatch] = x.detach()
        return F.linear(x, self.weight)

    def backward_input(self, microbatch: int, gradients: Any) -> Any:
        self.kept[microbatch] = (self.kept[microbatch], gradients[0])
        return (gradients[0] @ self.weight.detach(),)

    def backward_weight(self, microbatch: int) -> None:
        x, grad = self.kept.pop(microbatch)
        if not self.forgets:
            made = grad.t() @ x
            before = self.weight.grad
            self.weight.grad = made if before is None else before + made


def test_a_stage_brings_its_own_backward() -> None:
    module = Own(forgets=False).double()
    twin = nn.Linear(6, 4, bias=False).double()
    with torch.no_grad():
        twin.weight.copy_(module.weight)
    batches = [torch.randn(3, 6).double() for _ in range(3)]
    expected = plain(twin, batches)
    found = split(runner_for(module), batches)
    near(module.weight.grad, twin.weight.grad, "weight")
    for mine, other in zip(found, expected, strict=True):
        near(mine, other, "input")
