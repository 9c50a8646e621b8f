"""Contents of tensors and modules, kinds of layers, many tensors in one call."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from elche.torch_internals.lookup import REFUSED, bind, has, nothing, refusing
from elche.torch_internals.passes import HAS_VERSION

T = TypeVar("T")
Hooks = MutableMapping[int, Callable[..., Any]]


def hooks_seen_by(register: Callable[[Callable[..., Any]], Any]) -> Hooks:
    """The hooks beside one that is registered and removed again.

    Some microseconds, by public means.
    """
    handle = register(nothing)
    hooks: Hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def _hooks_by(register: str) -> Callable[[torch.Tensor], Hooks | None]:
    def hooks(tensor: torch.Tensor) -> Hooks | None:
        if not tensor.requires_grad or not tensor.is_leaf:
            return None
        return hooks_seen_by(getattr(tensor, register))

    return hooks


_ASKED = "hooks are found by registering another one, which takes longer"
accumulated_hooks: Callable[[torch.Tensor], Hooks | None] = (
    attrgetter("_post_accumulate_grad_hooks")
    if has(
        "torch.Tensor._post_accumulate_grad_hooks",
        "2.1",
        "finds a user's hooks on parameters",
        _ASKED,
    )
    else _hooks_by("register_post_accumulate_grad_hook")
)
"""Hooks that run when a parameter's gradient has been accumulated, in their order."""

version: Callable[[torch.Tensor], Any] = (
    attrgetter("_version") if HAS_VERSION else lambda tensor: object()
)
"""Another value after every change in place; without it, whenever it is asked for."""


def _held(attribute: str) -> Callable[[nn.Module], dict[str, Any]]:
    name = f"torch.nn.Module().{attribute}"
    if has(name, "2.0", "exchanges what modules hold", REFUSED):
        return attrgetter(attribute)
    return refusing(name)


held_parameters = _held("_parameters")
held_buffers = _held("_buffers")
held_modules = _held("_modules")


def _unsaved(module: nn.Module) -> set[str]:
    named = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    return named.keys() - module.state_dict().keys()


unsaved_buffers: Callable[[nn.Module], set[str]] = (
    attrgetter("_non_persistent_buffers_set")
    if has(
        "torch.nn.Module()._non_persistent_buffers_set",
        "2.0",
        "tells which buffers are saved",
        "module.state_dict() is asked for it",
    )
    else _unsaved
)
"""Names of a module's own buffers that are not part of its state."""


# Layers.

if TYPE_CHECKING:
    BatchNormBase = nn.modules.batchnorm._BatchNorm
    NormBase = nn.modules.batchnorm._NormBase
else:
    _BASE = "its first base class takes its place"
    BatchNormBase = bind(
        "torch.nn.modules.batchnorm._BatchNorm",
        "2.0",
        "recognises BatchNorm of every dimension",
        f"of nn.BatchNorm1d, {_BASE}",
        nn.BatchNorm1d.__bases__[0],
    )
    NormBase = bind(
        "torch.nn.modules.batchnorm._NormBase",
        "2.0",
        "recognises layers with running statistics",
        f"of BatchNorm layers, {_BASE}",
        BatchNormBase.__bases__[0],
    )

disable_dynamo: Callable[[T], T] = bind(
    "torch._compile._disable_dynamo",
    "2.1",
    "keeps a compiled graph out of a collective",
    "torch.compiler.disable takes its place, which takes longer to import",
    torch.compiler.disable,
)


# Many tensors in one call; without it one after the other.


def _each(method: str) -> Callable[..., list[Any]]:
    def call(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> list[Any]:
        count = len(tensors)
        rows = [o if isinstance(o, Sequence) else [o] * count for o in others]
        return [
            getattr(tensor, method)(*row, **named)
            for tensor, *row in zip(tensors, *rows, strict=True)
        ]

    return call


def _foreach(method: str, since: str = "2.0") -> Callable[..., Any]:
    return bind(
        f"torch._foreach_{method}",
        since,
        "works on many tensors in one call",
        "they are worked on one after the other",
        _each(method),
    )


foreach_add_ = _foreach("add_")
foreach_copy_ = _foreach("copy_", "2.1")
foreach_mul_ = _foreach("mul_")
foreach_norm = _foreach("norm")
foreach_zero_ = _foreach("zero_")
