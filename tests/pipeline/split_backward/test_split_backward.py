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
from torch.utils.checkpoint import checkpoint

from elche.comm.transport.messages import Message
from elche.errors import ConfigError, ProtocolError
from elche.pipeline.split_backward import weight_gradients
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
    """Two microbatches in flight, W in another order than I."""
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
    for number in reversed(range(len(batches))):
        runner.backward_weight(number)
    runner.end_step()
    return [one[0] if one else None for one in found]


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


def _hooked_output(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = F.linear(x, w, b)
    made.register_hook(lambda grad: grad * 3)
    return made * 2


def _tripled(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(3 * one for one in gradients)


def _hooked_node(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = F.linear(x, w, b)
    made.register_hook(lambda grad: grad + 1)
    made.grad_fn.register_prehook(_tripled)
    made.register_hook(lambda grad: grad * grad)
    return made * 2


def _hooked_node_apart(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The node of a view of a matrix product of rows that lie apart."""
    made = _apart(x) @ w
    made.grad_fn.register_prehook(_tripled)
    return made.sum(1) * 2


def _hooked_convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = F.conv2d(_square(x), w)
    made.grad_fn.register_prehook(_tripled)
    return made.flatten(1)


def _hooked_behind(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A hook on what a layer before has made, found through the graph."""
    made = torch.tanh(F.linear(x, w, b))
    made.grad_fn.next_functions[0][0].register_prehook(_tripled)
    return made


def _hooked_after_change(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    made = F.linear(x, w, b)
    made.mul_(2)
    made.register_hook(lambda grad: grad * grad)
    return made + 1


ONES = torch.ones(4, dtype=torch.float64)
TOKENS = torch.arange(12).reshape(3, 4) % 5
DEFERRED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "linear without bias": lambda: nn.Linear(6, 4, bias=False),
    "frozen bias": lambda: Of(lambda x, w: F.linear(x, w, ONES), (4, 6)),
    "matmul": lambda: Of(lambda x, w: x @ w, (6, 4)),
    "matmul left": lambda: Of(lambda x, w: torch.matmul(w, x.T), (5, 6)),
    "mm": lambda: Of(lambda x, w: torch.mm(x, w), (6, 4)),
    "addmm": lambda: Of(lambda x, b, w: torch.addmm(b, x, w), (4,), (6, 4)),
    "batched": lambda: Of(lambda x, w: x.expand(3, -1, -1) @ w, (3, 6, 4)),
    "rows apart": lambda: Of(
        lambda x, w, v, b: F.linear(_apart(x), w, b) + _apart(x) @ v,
        *((4, 6), (6, 4), (4,)),
    ),
    "broadcast weight": lambda: Of(lambda x, w: torch.matmul(x, w), (3, 6, 4)),
    "transposed": lambda: Of(lambda x, w: x @ w.t(), (4, 6)),
    "sliced": lambda: Of(lambda x, w: F.linear(x, w[2:5]) + F.linear(x, w[:3]), (6, 6)),
    "cast": lambda: Of(lambda x, w: F.linear(x, w.to(x.dtype)), (4, 6)),
    "conv1d": lambda: Of(
        lambda x, w, b: F.conv1d(x[:, None], w, b, stride=2, padding=1), (4, 1, 3), (4,)
    ),
    "conv2d": lambda: nn.Sequential(
        Of(_square), nn.Conv2d(1, 4, 3, padding="valid"), nn.Conv2d(4, 4, 2, groups=2)
    ),
    "conv3d": lambda: Of(
        lambda x, w: F.conv3d(_square(x)[:, :, None], w, dilation=2), (2, 1, 1, 2, 2)
    ),
    "transposed conv": lambda: nn.Sequential(
        Of(_square), nn.ConvTranspose2d(1, 3, 3, 2, 1, output_padding=1)
    ),
    "attention": Attention,
    "attention of two": Mixed,
    "hooked output": lambda: Of(_hooked_output, (4, 6), (4,)),
    "hooked node": lambda: Of(_hooked_node, (4, 6), (4,)),
    "hooked node apart": lambda: Of(_hooked_node_apart, (6, 4)),
    "hooked convolution": lambda: Of(_hooked_convolution, (2, 1, 3, 3)),
    "hooked behind": lambda: Of(_hooked_behind, (4, 6), (4,)),
    "hooked after change": lambda: Of(_hooked_after_change, (4, 6), (4,)),
    "hooked layer": lambda: _hooked_layer(),
    "own forward": lambda: Doubled(6, 4),
    "linear of rows apart": lambda: nn.Sequential(Of(_apart), nn.Linear(6, 4)),
    "forward set on it": lambda: _own_forward(),
    "shared": Twice,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant": lambda: Checkpointed(True),
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(True), nn.Linear(6, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 2)),
    "checkpointed dropout": lambda: Of(
        lambda x, w: checkpoint(
            lambda y: F.dropout(F.linear(y, w), 0.5), x, use_reentrant=False
        ),
        (4, 6),
    ),
}
IMMEDIATE: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(6),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "same padding": lambda: nn.Sequential(
        Of(_square), nn.Conv2d(1, 2, 3, padding="same")
    ),
    "bilinear": lambda: Of(lambda x, w: F.bilinear(x, x, w), (2, 6, 6)),
    "einsum": lambda: Of(lambda x, w: torch.einsum("ab,cb->ac", x, w), (4, 6)),
    "vector": lambda: Of(lambda x, w: x @ w, (6,)),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
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
}


def _traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(6, 4).double(), torch.ones(2, 6).double())


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
    monkeypatch.setattr(weight_gradients, "RemovableHandle", object)
    module = Of(_hooked_node, (4, 6), (4,)).double()
    runner = runner_for(module)
    check_equal(module, runner, [torch.randn(rows, 6).double() for rows in (5, 3)])
    assert runner.profile.deferred_share == 1.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [*DEFERRED, *IMMEDIATE])
def test_gradients_are_those_of_plain_backward(name: str) -> None:
    torch.manual_seed(1)
    module = (DEFERRED | IMMEDIATE)[name]().double()
    runner = runner_for(module)
    batches = [torch.randn(rows, 6).double() for rows in (5, 3, 5)]
    check_equal(module, runner, batches)
    if name in DEFERRED:
        assert runner.profile.deferred_share == 1.0
    else:
        assert runner.profile.deferred_share == 0.0


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
    check_equal(module, runner, [TOKENS, TOKENS[:2] + 0])
    assert runner.profile.deferred_share == 1.0


def check_equal(
    module: nn.Module, runner: StageBackward, batches: list[torch.Tensor]
) -> None:
    expected_inputs = plain(module, batches)
    expected = {name: one.grad for name, one in module.named_parameters()}
    for one in module.parameters():
        one.grad = None
    inputs = split(runner, batches)
    for name, one in module.named_parameters():
        near(one.grad, expected[name], name)
    for number, (mine, other) in enumerate(zip(inputs, expected_inputs, strict=True)):
        near(mine, other, f"input {number}")


def near(a: torch.Tensor | None, b: torch.Tensor | None, name: str) -> None:
    assert (a is None) == (b is None), name
    if a is not None and b is not None:
        assert (a - b).norm() <= 1e-12 * b.norm(), name


def test_a_gpt_defers_at_least_95_percent() -> None:
    model = nn.Sequential(
        Embed(65, 32, 64), *(Block(64, 4) for _ in range(3)), nn.Linear(64, 65)
    ).double()
    runner = runner_for(model)
    check_equal(model, runner, [torch.randint(65, (2, 32)) for _ in range(2)])
    profile = runner.profile
    assert profile.immediate_flops > 0
    assert profile.deferred_share >= 0.95


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
        inputs = split(runner, batches)
    for one, other in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, other, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inputs, plain_inputs)
    assert runner.profile.deferred_share == 1.0


def test_a_stage_that_differentiates_inside_is_told_the_way_out() -> None:
    def penalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + inner.sum()

    runner = runner_for(Of(penalised, (4, 6)))
    runner.begin_step()
    with pytest.raises(ConfigError, match="split_backward=False"):
        forward(runner, 0, torch.randn(2, 6))


def test_an_input_changed_in_place_is_found_as_autograd_does() -> None:
    def spoilt(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x * 1
        y = F.linear(x, w)
        x.add_(1)
        return y

    runner = runner_for(Of(spoilt, (4, 6)))
    runner.begin_step()
    runner.keep(0, forward(runner, 0, torch.randn(2, 6)))
    runner.backward_input(0, [torch.ones(2, 4)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        runner.backward_weight(0)


def test_a_gradient_of_another_shape_is_refused() -> None:
    runner = runner_for(nn.Linear(6, 4))
    runner.begin_step()
    runner.keep(0, forward(runner, 0, torch.randn(2, 6)))
    with pytest.raises(ProtocolError, match=r"shape \[3, 2, 4\] came for .* \[2, 4\]"):
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
    check_equal(block, runner, batches)
    weights = sum(one.numel() for one in block.parameters() if one.dim() > 1)
    assert runner.profile.deferred_flops == 2 * weights * 5 * (3 + 2)


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
