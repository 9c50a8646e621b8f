"""Modules of which a split backward defers all, nothing, or some weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.pipeline.cases.pipeline_cases import (
    Attention,
    Checkpointed,
    Recurrent,
    Twice,
)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Three dimensions, as attention transposes them: torch takes another way there."""
    return x.expand(3, -1, -1).transpose(0, 1)


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


def _tripled(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(3 * one for one in gradients)


def _hooked_node(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    made = layer(x)
    made.register_hook(lambda grad: grad + 1)
    made.grad_fn.register_prehook(_tripled)
    made.register_hook(lambda grad: grad * grad)
    return made * 2


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


DEFERRED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "linear without bias": lambda: nn.Linear(6, 4, bias=False),
    "frozen bias": lambda: _frozen(nn.Linear(6, 4), "bias"),
    "one bias for all": lambda: with_bias(1),
    "conv1d of transformers": Conv1D,
    "rows apart": lambda: Over(
        lambda x, a, b: a(_apart(x)) + b(_apart(x)), nn.Linear(6, 4), nn.Linear(6, 4)
    ),
    "conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, stride=2, padding=1)
    ),
    "conv2d": lambda: nn.Sequential(
        Over(_square), nn.Conv2d(1, 4, 3, padding="valid"), nn.Conv2d(4, 4, 2, groups=2)
    ),
    "conv3d": lambda: Over(
        lambda x, layer: layer(_square(x)[:, :, None]),
        nn.Conv3d(1, 2, (1, 2, 2), dilation=2),
    ),
    "transposed conv": lambda: nn.Sequential(
        Over(_square), nn.ConvTranspose2d(1, 3, 3, 2, 1, output_padding=1)
    ),
    "attention": Attention,
    "attention of two": Mixed,
    "hooked node": lambda: Over(_hooked_node, nn.Linear(6, 4)),
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
    "product": lambda: Over(lambda x, a: x @ a.weight.t() + a.bias, nn.Linear(6, 4)),
    "function": lambda: Over(
        lambda x, a: F.linear(x, a.weight, a.bias), nn.Linear(6, 4)
    ),
    "layer norm": lambda: nn.LayerNorm(6),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "same padding": lambda: nn.Sequential(
        Over(_square), nn.Conv2d(1, 2, 3, padding="same")
    ),
    "circular padding": lambda: nn.Sequential(
        Over(_square), nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")
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
    "hooked accumulation": lambda: hooked_accumulation("register_prehook"),
    "watched accumulation": lambda: hooked_accumulation("register_hook"),
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


def with_bias(*shape: int) -> nn.Module:
    module = nn.Linear(6, 4)
    module.bias = nn.Parameter(torch.randn(shape))
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


def hooked_accumulation(register: str) -> nn.Module:
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
