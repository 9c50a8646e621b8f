"""Modules of torch whose weight gradients are deferred while their stage runs.

A module is split if its type is exactly a known one, its forward is torch's own, and
its weights are plain parameters without user hooks. The stage replaces its forward
while it runs. For everything else (recurrent layers, norms, parametrized, pruned or
compiled modules, functions of weights outside of modules) autograd computes the weight
gradients together with the input gradient.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from elche.pipeline.split_backward.guard import has_user_hooks
from elche.pipeline.split_backward.weight_gradients import (
    LINEAR,
    TRANSPOSED_LINEAR,
    WeightGradients,
    convolution,
    defer,
    embedding,
)
from elche.torch_internals.held import held_parameters, hooks_seen_by
from elche.torch_internals.passes import attention_with, is_compiled

_Output: TypeAlias = torch.Tensor | None
"""Output of a deferring forward; None if the forward cannot defer."""
_Place: TypeAlias = tuple[dict[str, Any], str]
"""A module's parameter dict, and a name in it."""

_CONV1D = "transformers.pytorch_utils.Conv1D"
"""Linear layer with a transposed weight, as in GPT-2."""
_OUT_PROJECTION = nn.modules.linear.NonDynamicallyQuantizableLinear
_IN_PROJECTIONS = (
    *("in_proj_weight", "in_proj_bias"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight"),
)


def _linear(store: WeightGradients, module: Any, input: torch.Tensor) -> _Output:
    return defer(store, LINEAR, input, module.weight, module.bias)


def _conv1d(store: WeightGradients, module: Any, x: torch.Tensor) -> _Output:
    return defer(store, TRANSPOSED_LINEAR, x, module.weight, module.bias)


def _embedding(store: WeightGradients, module: Any, input: torch.Tensor) -> _Output:
    if module.max_norm is not None or module.sparse:
        return None
    operation = embedding(module.padding_idx, module.scale_grad_by_freq)
    return defer(store, operation, input, module.weight, None)


def _convolution(
    store: WeightGradients, module: Any, input: torch.Tensor, output_size: Any = None
) -> _Output:
    weight, padding = module.weight, module.padding
    is_plain = module.padding_mode == "zeros" and output_size is None
    if not is_plain or padding == "same" or input.dim() != weight.dim():
        return None
    if padding == "valid":
        padding = (0,) * (weight.dim() - 2)
    operation = convolution(
        *(module.stride, padding, module.dilation, module.transposed),
        *(module.output_padding, module.groups),
    )
    return defer(store, operation, input, weight, module.bias)


_attending = threading.local()


def _projection(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    made = defer(_attending.store, LINEAR, input, weight, bias)
    return F.linear(input, weight, bias) if made is None else made


_attend = attention_with(_projection)


def _attention(store: WeightGradients, *args: Any, **kwargs: Any) -> Any:
    _attending.store = store
    try:
        return _attend(*args, **kwargs)
    finally:
        del _attending.store


_KNOWN: dict[type[nn.Module], tuple[Callable[..., _Output], Sequence[str]]] = {
    nn.Linear: (_linear, ["linear"]),
    nn.Embedding: (_embedding, ["embedding"]),
    nn.Conv1d: (_convolution, ["conv1d"]),
    nn.Conv2d: (_convolution, ["conv2d"]),
    nn.Conv3d: (_convolution, ["conv3d"]),
    nn.ConvTranspose1d: (_convolution, ["conv_transpose1d"]),
    nn.ConvTranspose2d: (_convolution, ["conv_transpose2d"]),
    nn.ConvTranspose3d: (_convolution, ["conv_transpose3d"]),
    nn.MultiheadAttention: (
        _attention,
        ["linear", "multi_head_attention_forward", "scaled_dot_product_attention"],
    ),
}
"""Deferring forward of each type, and the torch functions that its forward calls."""


def _code_of(kind: type[nn.Module]) -> list[Any]:
    return [kind.forward, *(getattr(F, name) for name in _KNOWN[kind][1])]


_CODE = {kind: _code_of(kind) for kind in _KNOWN}


def _forward_of(kind: type[nn.Module]) -> Callable[..., _Output] | None:
    """Deferring forward of a type; None if the type is unknown or patched."""
    if kind in _KNOWN:
        return _KNOWN[kind][0] if _code_of(kind) == _CODE[kind] else None
    return _conv1d if f"{kind.__module__}.{kind.__qualname__}" == _CONV1D else None


@final
class _Split:
    """Replacement forward of a split module; a copy of it runs the plain forward."""

    __name__ = "forward"  # a pickled copy of the module looks it up

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., _Output],
        weights: Sequence[tuple[_Place, Any]],
    ) -> None:
        self.module = module
        self._forward = forward
        self._weights = weights

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Defers if the module's weights and code are unchanged since `begin_step`."""
        is_found = module is self.module and _forward_of(type(module)) is not None
        if is_found and all(
            held.get(name) is one for (held, name), one in self._weights
        ):
            made = self._forward(module, *args, **kwargs)
            if made is not None:
                return made
        return type(module).forward(module, *args, **kwargs)


@final
class SplitModules:
    """Split modules of a stage.

    Args:
        modules: modules that may be split, with all their submodules.
        store: store of the deferred weight gradients.
    """

    def __init__(self, modules: Sequence[nn.Module], store: WeightGradients) -> None:
        self._modules = modules
        self._store = store
        self._split: list[_Split] = []
        self._hooks_seen: object = None
        self._hooked: set[int] = set()

    def begin_step(self) -> None:
        """Searches the modules again, since they may have changed."""
        self._split = []
        found = {id(one): one for top in self._modules for one in top.modules()}
        for module in [one for one in found.values() if is_compiled(one)]:
            for inner in module.modules():
                found.pop(id(inner), None)
        candidates = [
            (module, forward, weights)
            for module in found.values()
            if (forward := _forward_of(type(module)))
            and (weights := _weights_of(module))
        ]
        if _hooks_made() != self._hooks_seen:
            every = [one for *_, weights in candidates for _, one in weights]
            self._hooked = {
                id(one) for one in every if one is not None and _hooked(one)
            }
            self._hooks_seen = _hooks_made()
        self._split = [
            _Split(module, partial(forward, self._store), weights)
            for module, forward, weights in candidates
            if not any(id(one) in self._hooked for _, one in weights)
        ]

    def unsplit(self, named: Mapping[str, nn.Module]) -> list[str]:
        """Names and types of modules with trainable matrices that are not split."""
        split = {id(one.module) for one in self._split}
        split |= {id(getattr(one.module, "out_proj", None)) for one in self._split}
        return [
            f"{name} ({type(module).__name__})"
            for name, module in named.items()
            if id(module) not in split
            and any(
                one.requires_grad and one.dim() > 1
                for one in module.parameters(recurse=False)
            )
        ]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the modules defer their weight gradients."""
        bound = [
            (vars(one.module), types.MethodType(one, one.module)) for one in self._split
        ]
        for attributes, forward in bound:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, forward in bound:
                if attributes.get("forward") is forward:
                    del attributes["forward"]


def _weights_of(module: nn.Module) -> list[tuple[_Place, Any]]:
    """A module's parameters by their places; empty if the module is not split.

    Parameters must be trainable, without user hooks that depend on their autograd
    gradient. Hooks of objects with ``only_counts`` are ignored.
    """
    held = held_parameters(module)
    names = ["weight"] if isinstance(module, nn.Embedding) else ["weight", "bias"]
    places = [(held, name) for name in names]
    if isinstance(module, nn.MultiheadAttention):
        if type(module.out_proj) is not _OUT_PROJECTION:
            return []
        places = [(held_parameters(module.out_proj), name) for name in names]
        places += [(held, name) for name in _IN_PROJECTIONS]
    if "forward" in vars(module) or any(name not in all_ for all_, name in places):
        return []  # the forward or a weight is not torch's own
    weights = [(place, place[0][place[1]]) for place in places]
    given = [(name, one) for (_, name), one in weights if one is not None]
    is_plain = all(
        type(one) is nn.Parameter
        and one.is_floating_point()
        and one.dtype is given[0][1].dtype
        and one.layout is torch.strided
        and (one.dim() == 1) == name.endswith("bias")
        and not has_user_hooks(one)
        for name, one in given
    )
    learns = any(one.requires_grad and one.dim() > 1 for _, one in given)
    return weights if is_plain and learns else []


def _hooks_made() -> object:
    """Value that changes whenever a hook is registered on a tensor or a node."""
    return getattr(RemovableHandle, "next_id", None) or object()


def _hooked(parameter: nn.Parameter) -> bool:
    """True if a user has hooks on a parameter, or on its accumulation node.

    torch shows hooks only to code that registers another one: some microseconds.
    """
    if not parameter.requires_grad:
        return False
    node = get_gradient_edge(parameter).node
    ways = (parameter.register_hook, node.register_prehook, node.register_hook)
    return any(map(hooks_seen_by, ways))
