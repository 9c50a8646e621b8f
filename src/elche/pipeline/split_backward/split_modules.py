"""Modules of torch whose weight gradients are deferred while their stage runs.

A module is split if it is exactly of a known type with the forward that torch gave it,
and holds its weights as plain parameters without hooks of a user. Such a module gets a
forward of its own meanwhile. All else runs as it is, and autograd computes its weight
gradients with the input gradient: recurrent layers, parametrized, pruned or compiled
modules, norms (a few sums: keeping their input longer would cost more than it gains),
and functions of weights outside of modules, such as a head that is tied to an embedding
by `F.linear`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from elche.pipeline.split_backward.operations import (
    LINEAR,
    TRANSPOSED_LINEAR,
    convolution,
    embedding,
)
from elche.pipeline.split_backward.weight_gradients import WeightGradients, defer
from elche.torch_internals.held import (
    accumulated_hooks,
    held_parameters,
    hooks_seen_by,
)
from elche.torch_internals.passes import CAN_SPLIT, attention_with, is_compiled

DeferringForward: TypeAlias = Callable[..., torch.Tensor | None]
"""A forward with its module as first argument; returns None where it cannot defer."""
_Place: TypeAlias = tuple[dict[str, Any], str]
"""The parameters of a module, and a name among them."""

_CONV1D = "transformers.pytorch_utils.Conv1D"
"""A linear layer with a transposed weight, in GPT-2."""
_OUT_PROJECTION = nn.modules.linear.NonDynamicallyQuantizableLinear
_IN_PROJECTIONS = (
    *("in_proj_weight", "in_proj_bias"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight"),
)


def _linear(store: WeightGradients) -> DeferringForward:
    def forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor | None:
        return defer(store, LINEAR, input, module.weight, module.bias)

    return forward


def _transposed_linear(store: WeightGradients) -> DeferringForward:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor | None:
        return defer(store, TRANSPOSED_LINEAR, x, module.weight, module.bias)

    return forward


def _embedding(store: WeightGradients) -> DeferringForward:
    def forward(module: nn.Embedding, input: torch.Tensor) -> torch.Tensor | None:
        if module.max_norm is not None or module.sparse:
            return None
        operation = embedding(module.padding_idx, module.scale_grad_by_freq)
        return defer(store, operation, input, module.weight, None)

    return forward


def _convolution(store: WeightGradients) -> DeferringForward:
    def forward(
        module: Any, input: torch.Tensor, output_size: Any = None
    ) -> torch.Tensor | None:
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

    return forward


def _attention(store: WeightGradients) -> DeferringForward:
    def linear(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        made = defer(store, LINEAR, input, weight, bias)
        return F.linear(input, weight, bias) if made is None else made

    return attention_with(linear)


class _Kind(NamedTuple):
    """A type of module that is split.

    Attributes:
        forward: makes its deferring forward.
        functions: of torch.nn.functional that its own forward calls; while one of them
            is patched it is not split.
    """

    forward: Callable[[WeightGradients], DeferringForward]
    functions: tuple[str, ...] = ()


_KNOWN: dict[type[nn.Module], _Kind] = {
    nn.Linear: _Kind(_linear, ("linear",)),
    nn.Embedding: _Kind(_embedding, ("embedding",)),
    nn.Conv1d: _Kind(_convolution, ("conv1d",)),
    nn.Conv2d: _Kind(_convolution, ("conv2d",)),
    nn.Conv3d: _Kind(_convolution, ("conv3d",)),
    nn.ConvTranspose1d: _Kind(_convolution, ("conv_transpose1d",)),
    nn.ConvTranspose2d: _Kind(_convolution, ("conv_transpose2d",)),
    nn.ConvTranspose3d: _Kind(_convolution, ("conv_transpose3d",)),
    nn.MultiheadAttention: _Kind(
        _attention,
        (
            *("linear", "multi_head_attention_forward", "softmax", "dropout"),
            "scaled_dot_product_attention",
        ),
    ),
}
_OF_TORCH = {
    kind: (kind.forward, [getattr(F, name) for name in known.functions])
    for kind, known in _KNOWN.items()
}


def _kind_of(kind: type[nn.Module]) -> _Kind | None:
    """How a type of module is split; None where it is not, or is patched."""
    known = _KNOWN.get(kind)
    if known is not None:
        functions = [getattr(F, name) for name in known.functions]
        return known if (kind.forward, functions) == _OF_TORCH[kind] else None
    path = f"{kind.__module__}.{kind.__qualname__}"
    return _Kind(_transposed_linear) if path == _CONV1D else None


@final
class _Split:
    """The forward of a module that is split; `types.MethodType` binds it.

    Args:
        module: the module. A copy that is made of it meanwhile runs its plain forward.
        forward: for modules of its type.
        weights: its parameters by their places.
    """

    __name__ = "forward"  # what a pickled copy of the module looks for

    def __init__(
        self,
        module: nn.Module,
        forward: DeferringForward,
        weights: Sequence[tuple[_Place, Any]],
    ) -> None:
        self.module = module
        self._forward = forward
        self._weights = weights

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Defers if the module has the weights that were found in it."""
        if module is self.module and all(
            held.get(name) is one for (held, name), one in self._weights
        ):
            made = self._forward(module, *args, **kwargs)
            if made is not None:
                return made
        return type(module).forward(module, *args, **kwargs)


@final
class SplitModules:
    """The modules of a stage that are split.

    Args:
        modules: those, and all inside of them, that may be.
        store: where weight gradients wait.
    """

    def __init__(self, modules: Sequence[nn.Module], store: WeightGradients) -> None:
        self._modules = modules
        self._store = store
        self._by_kind: dict[Any, DeferringForward] = {}
        self._split: list[_Split] = []
        self._hooks_seen: object = None
        self._hooked: set[int] = set()

    def begin_step(self) -> None:
        """Finds the modules anew: they may have been changed since."""
        self._split = []
        if not CAN_SPLIT:
            return
        found = {id(one): one for top in self._modules for one in top.modules()}
        for module in [one for one in found.values() if is_compiled(one)]:
            for inner in module.modules():
                found.pop(id(inner), None)
        candidates = [
            (module, kind, [((held, name), held[name]) for held, name in places])
            for module in found.values()
            if (kind := _kind_of(type(module))) and (places := _places(module))
        ]
        if _hooks_made() != self._hooks_seen:
            every = [one for *_, weights in candidates for _, one in weights]
            self._hooked = {
                id(one) for one in every if one is not None and _hooked(one)
            }
            self._hooks_seen = _hooks_made()
        self._split = [
            _Split(module, self._forward_of(kind), weights)
            for module, kind, weights in candidates
            if not any(id(one) in self._hooked for _, one in weights)
        ]

    def unsplit(self, named: Mapping[str, nn.Module]) -> list[str]:
        """Names and types of the modules with learning matrices that are not split."""
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
        """The modules defer meanwhile."""
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

    def _forward_of(self, kind: _Kind) -> DeferringForward:
        if kind.forward not in self._by_kind:
            self._by_kind[kind.forward] = kind.forward(self._store)
        return self._by_kind[kind.forward]


def _places(module: nn.Module) -> list[_Place]:
    """The places of a module's parameters; empty if it is not split."""
    if "forward" in vars(module):
        return []
    held = held_parameters(module)
    places = [(held, "weight"), (held, "bias")]
    if isinstance(module, nn.Embedding):
        places = places[:1]
    elif isinstance(module, nn.MultiheadAttention):
        if type(module.out_proj) is not _OUT_PROJECTION:
            return []
        out = held_parameters(module.out_proj)
        places = [(held, name) for name in _IN_PROJECTIONS]
        places += [(out, "weight"), (out, "bias")]
    return places if _may_defer(places) else []


def _may_defer(places: Sequence[_Place]) -> bool:
    """Whether there are weights that learn, all of them plain parameters.

    Nobody notices that autograd does not see their gradients: hooks of a user would,
    those of an object that says ``only_counts`` do not matter.
    """
    if any(name not in held for held, name in places):
        return False  # computed from others
    weights = [(name, held[name]) for held, name in places if held[name] is not None]
    for name, one in weights:
        hooks = accumulated_hooks(one) or {}
        owners = (getattr(hook, "__self__", None) for hook in hooks.values())
        if not (
            type(one) is nn.Parameter
            and one.is_floating_point()
            and one.dtype is weights[0][1].dtype
            and one.layout is torch.strided
            and (one.dim() > 1 or name.endswith("bias"))
            and (one.dim() == 1 or name.endswith("weight"))
            and all(getattr(owner, "only_counts", False) for owner in owners)
        ):
            return False
    return any(one.requires_grad and one.dim() > 1 for _, one in weights)


def _hooks_made() -> object:
    """Another value whenever a hook has been put on a tensor or a node since.

    torch numbers the handles of all hooks; where it does not, nobody can be sure.
    """
    return getattr(RemovableHandle, "next_id", None) or object()


def _hooked(parameter: nn.Parameter) -> bool:
    """Whether a user has put hooks on a parameter, or where autograd accumulates.

    torch shows them only to who registers another one; it takes some microseconds.
    """
    if not parameter.requires_grad:
        return False
    node = get_gradient_edge(parameter).node
    ways = (parameter.register_hook, node.register_prehook, node.register_hook)
    return any(map(hooks_seen_by, ways))
