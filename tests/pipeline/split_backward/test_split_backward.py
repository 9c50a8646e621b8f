"""I and W together give what one plain backward gives, for any layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from elche.errors import ConfigError, ProtocolError
from elche.pipeline.peers.stage_messages import Message
from elche.pipeline.split_backward import split_modules
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.split_backward.guard import ContributionGuard
from elche.pipeline.stage import Layer, OwnBackward, Stage
from tests.pipeline.cases.pipeline_cases import (
    Attention,
    Block,
    Checkpointed,
    Embed,
    Recurrent,
    Twice,
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
    named = runner.stage.named_parameters()
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


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Three dimensions, as attention transposes them: torch takes another way there."""
    return x.expand(3, -1, -1).transpose(0, 1)


class Of(nn.Module):
    """A function of an activation and parameters of these shapes."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: Any) -> None:
        super().__init__()
        self.function = function
        for index, shape in enumerate(shapes):
            setattr(self, f"p{index}", nn.Parameter(torch.randn(shape)))
        self.count = len(shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *(getattr(self, f"p{i}") for i in range(self.count)))


def _square(x: torch.Tensor) -> torch.Tensor:
    return x[:, None, :, None] * x[:, None, None, :]


class Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Mixed(nn.Module):
    """torch's attention on rows that lie apart, queries and keys not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, kdim=6, vdim=6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = _apart(x) * 2
        return self.attention(_apart(x), keys, keys, need_weights=False)[0]


class Over(nn.Module):
    """A function of an activation and some modules."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.parts)


def _hooked_output(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    made: torch.Tensor = layer(x)
    made.register_hook(lambda grad: grad * 3)
    return made * 2


def _tripled(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(3 * one for one in gradients)


def _hooked_node(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    made = layer(x)
    made.register_hook(lambda grad: grad + 1)
    made.grad_fn.register_prehook(_tripled)
    made.register_hook(lambda grad: grad * grad)
    return made * 2


def _hooked_node_apart(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """The node of a view of a matrix product of rows that lie apart."""
    made = layer(_apart(x))
    made.grad_fn.register_prehook(_tripled)
    return made.sum(1) * 2


def _hooked_convolution(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    made = layer(_square(x))
    made.grad_fn.register_prehook(_tripled)
    return made.flatten(1)


def _hooked_behind(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """A hook on what a layer before has made, found through the graph."""
    made = torch.tanh(layer(x))
    made.grad_fn.next_functions[0][0].register_prehook(_tripled)
    return made


def _hooked_after_change(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    made: torch.Tensor = layer(x)
    made.mul_(2)
    made.register_hook(lambda grad: grad * grad)
    return made + 1


def _changed(x: torch.Tensor, *layers: nn.Module) -> torch.Tensor:
    """Outputs that are changed in place, of matrices and of more dimensions."""
    linear, apart, convolution = layers
    made = linear(x.expand(2, -1, -1)).relu_()
    made = made + apart(_apart(x)).mul_(2).sum(1)
    return made.sum(0) + convolution(x[:, None]).add_(1).relu_().flatten(1)


def _frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


class Conv1D(nn.Module):
    """That of transformers, as far as it is known by its name."""

    __module__, __qualname__ = "transformers.pytorch_utils", "Conv1D"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, 6), self.weight).view(-1, 4)


TOKENS = torch.arange(12).reshape(3, 4) % 5
DEFERRED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "linear without bias": lambda: nn.Linear(6, 4, bias=False),
    "frozen bias": lambda: _frozen(nn.Linear(6, 4), "bias"),
    "one bias for all": lambda: _small_bias(),
    "conv1d of transformers": Conv1D,
    "rows apart": lambda: Over(
        lambda x, a, b: a(_apart(x)) + b(_apart(x)), nn.Linear(6, 4), nn.Linear(6, 4)
    ),
    "conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, stride=2, padding=1)
    ),
    "conv2d": lambda: nn.Sequential(
        Of(_square), nn.Conv2d(1, 4, 3, padding="valid"), nn.Conv2d(4, 4, 2, groups=2)
    ),
    "conv3d": lambda: Over(
        lambda x, layer: layer(_square(x)[:, :, None]),
        nn.Conv3d(1, 2, (1, 2, 2), dilation=2),
    ),
    "transposed conv": lambda: nn.Sequential(
        Of(_square), nn.ConvTranspose2d(1, 3, 3, 2, 1, output_padding=1)
    ),
    "attention": Attention,
    "attention of two": Mixed,
    "hooked output": lambda: Over(_hooked_output, nn.Linear(6, 4)),
    "hooked node": lambda: Over(_hooked_node, nn.Linear(6, 4)),
    "hooked node apart": lambda: Over(_hooked_node_apart, nn.Linear(6, 4)),
    "hooked convolution": lambda: Over(_hooked_convolution, nn.Conv2d(1, 2, 3)),
    "hooked behind": lambda: Over(_hooked_behind, nn.Linear(6, 4)),
    "hooked after change": lambda: Over(_hooked_after_change, nn.Linear(6, 4)),
    "changed in place": lambda: Over(
        _changed, nn.Linear(6, 4), nn.Linear(6, 4), nn.Conv1d(1, 1, 3)
    ),
    "hooked layer": lambda: _hooked_layer(),
    "twice": lambda: Over(
        lambda x, layer: layer(torch.tanh(layer(x))), nn.Linear(6, 6)
    ),
    "tied": lambda: _tied(),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant": lambda: Checkpointed(True),
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(True), nn.Linear(6, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 2)),
    "checkpointed dropout": lambda: Over(
        lambda x, layer: checkpoint(
            lambda y: F.dropout(layer(y), 0.5), x, use_reentrant=False
        ),
        nn.Linear(6, 4),
    ),
}
IMMEDIATE: dict[str, Callable[[], nn.Module]] = {
    "frozen weight": lambda: _frozen(nn.Linear(6, 4), "weight"),
    "matmul": lambda: Of(lambda x, w: x @ w, (6, 4)),
    "function": lambda: Of(F.linear, (4, 6), (4,)),
    "layer norm": lambda: nn.LayerNorm(6),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "same padding": lambda: nn.Sequential(
        Of(_square), nn.Conv2d(1, 2, 3, padding="same")
    ),
    "circular padding": lambda: nn.Sequential(
        Of(_square), nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")
    ),
    "size of output": lambda: Over(
        lambda x, layer: layer(_square(x), output_size=[12, 12]),
        nn.ConvTranspose2d(1, 2, 2, 2),
    ),
    "no batch": lambda: Over(lambda x, layer: layer(x[None]), nn.Conv2d(1, 2, (1, 3))),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(6, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.5),
    "compiled": lambda: torch.compile(nn.Linear(6, 4), backend="eager"),
    "scripted": lambda: torch.jit.trace(
        nn.Linear(6, 4).double(), torch.ones(2, 6).double()
    ),
    "hooked": lambda: _hooked(),
    "hooked accumulation": lambda: _hooked_accumulation("register_prehook"),
    "watched accumulation": lambda: _hooked_accumulation("register_hook"),
    "parametrized bias": lambda: torch.nn.utils.parametrize.register_parametrization(
        nn.Linear(6, 4), "bias", nn.Identity()
    ),
    "own forward": lambda: Doubled(6, 4),
    "forward set on it": lambda: _own_forward(),
}
MIXED: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "weight used outside, too": (Twice, {"first.weight"}),
    "attention with a hook": (
        lambda: Over(
            lambda x, a, b: b(a(_apart(x), _apart(x), _apart(x))[0]),
            *(_hooked_attention(), nn.Linear(6, 6)),
        ),
        {
            *("parts.0.in_proj_weight", "parts.0.in_proj_bias"),
            *("parts.0.out_proj.weight", "parts.0.out_proj.bias"),
        },
    ),
}
"""Modules of which these parameters are not deferred, or not everywhere."""


def _small_bias() -> nn.Module:
    module = nn.Linear(6, 4)
    module.bias = nn.Parameter(torch.randn(1))
    return module


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module[2].weight = module[0].weight
    return module


def _hooked_attention() -> nn.Module:
    module = nn.MultiheadAttention(6, 2)
    module.out_proj.weight.register_hook(lambda grad: grad * 2)
    return module


def _own_forward() -> nn.Module:
    module = nn.Linear(6, 4)
    vars(module)["forward"] = lambda x: F.linear(x, module.weight, module.bias) * 3
    return module


def _hooked_layer() -> nn.Module:
    module = nn.Linear(6, 4)
    module.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,))
    module.register_forward_hook(lambda _, given, made: made * given[0].sum())
    return module


def _hooked() -> nn.Module:
    module = nn.Linear(6, 4, bias=False)
    module.weight.register_hook(lambda grad: grad * 3)
    return module


def _hooked_accumulation(register: str) -> nn.Module:
    """A hook where autograd accumulates; it ends with the node that it stands on."""
    module = nn.Linear(6, 4, bias=False).double()
    node = get_gradient_edge(module.weight).node
    module.kept = node
    seen: list[int] = []
    if register == "register_prehook":
        node.register_prehook(_tripled)
    else:
        node.register_hook(lambda *_: seen.append(1))
    module.seen = seen
    return module


def test_hooks_on_accumulation_run_once_per_microbatch() -> None:
    module = _hooked_accumulation("register_hook")
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
        learning = runner.stage.named_parameters()
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
    assert check_equal(module, runner, [TOKENS, TOKENS[:2] + 0]) == set()


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


def test_a_gpt_defers_all_but_norms_and_positions() -> None:
    model = nn.Sequential(
        Embed(65, 32, 64), *(Block(64, 4) for _ in range(3)), nn.Linear(64, 65)
    ).double()
    batches = [torch.randint(65, (2, 32)) for _ in range(2)]
    early = check_equal(model, runner_for(model), batches)
    norms = {n for n, _ in model.named_parameters() if "norm" in n}
    assert early == norms | {"0.positions"}


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


def test_a_stage_that_differentiates_inside_is_told_the_way_out() -> None:
    def penalised(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        y = layer(x)
        (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
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


def test_a_gradient_of_another_shape_is_refused() -> None:
    runner = runner_for(nn.Linear(6, 4))
    runner.begin_step()
    runner.keep(0, forward(runner, 0, torch.randn(2, 6)))
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        runner.backward_input(0, [torch.ones(3, 2, 4)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_no_input_of_the_layers_inside(reentrant: bool) -> None:
    inner: list[Any] = []

    def keep(_: nn.Module, __: Any, made: torch.Tensor) -> None:
        inner.append(weakref.ref(made.untyped_storage()))

    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    module[1].register_forward_hook(keep)
    outer = Of(lambda x: checkpoint(module, x * 2, use_reentrant=reentrant))
    outer.add_module("inner", module)
    runner = runner_for(outer)
    runner.begin_step()
    runner.keep(0, forward(runner, 0, torch.randn(2, 6)))
    assert [one() for one in inner] == [None]


def test_modules_are_as_before_after_a_forward_that_fails() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    module = nn.Sequential(nn.Linear(6, 6), nn.MultiheadAttention(6, 2), Of(fail))
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
    twin = Of(F.linear, (4, 6)).double()
    with torch.no_grad():
        twin.p0.copy_(module.weight)
    batches = [torch.randn(3, 6).double() for _ in range(3)]
    expected = plain(twin, batches)
    found = split(runner_for(module), batches)
    near(module.weight.grad, twin.p0.grad, "weight")
    for mine, other in zip(found, expected, strict=True):
        near(mine, other, "input")


def test_actions_out_of_order_are_refused() -> None:
    runner = runner_for(nn.Linear(6, 4))
    runner.begin_step()
    runner.keep(0, forward(runner, 0, torch.randn(2, 6)))
    with pytest.raises(ProtocolError, match="before its input gradient"):
        runner.backward_weight(0)
    runner.full_backward(0, [torch.ones(2, 4)])
    with pytest.raises(ProtocolError, match="has been through already"):
        runner.backward_weight(0)
    runner.keep(1, forward(runner, 1, torch.randn(2, 6)))
    with pytest.raises(ProtocolError, match="never finished microbatches"):
        runner.end_step()
