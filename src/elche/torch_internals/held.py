"""Private attributes of tensors and modules, norm base classes, foreach functions."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from elche.torch_internals.lookup import bind

T = TypeVar("T")
Hooks = MutableMapping[int, Callable[..., Any]]


def hooks_seen_by(register: Callable[[Callable[..., Any]], Any]) -> Hooks:
    """Returns the dict of hooks that `register` adds to.

    Registers and removes a dummy hook through public API; takes a few microseconds.
    """
    handle = register(lambda *_: None)
    hooks: Hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


accumulated_hooks: Callable[[torch.Tensor], Hooks | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)
"""Post-accumulate-grad hooks of a parameter, in order; None if there are none."""

_gradient_hooks: Callable[[torch.Tensor], Hooks | None] = attrgetter("_backward_hooks")


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if a tensor has hooks of its gradient, of either kind."""
    return bool(_gradient_hooks(tensor) or accumulated_hooks(tensor))


version: Callable[[torch.Tensor], Any] = attrgetter("_version")
"""Version counter of a tensor; differs after every in-place change."""

held_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
held_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
held_modules: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
unsaved_buffers: Callable[[nn.Module], set[str]] = attrgetter(
    "_non_persistent_buffers_set"
)
"""Names of a module's own non-persistent buffers."""

if TYPE_CHECKING:
    BatchNormBase = nn.modules.batchnorm._BatchNorm
    NormBase = nn.modules.batchnorm._NormBase
else:
    (BatchNormBase,) = nn.BatchNorm1d.__bases__
    (NormBase,) = BatchNormBase.__bases__

disable_dynamo: Callable[[T], T] = bind(
    "torch._compile._disable_dynamo", "keeps a compiled graph out of a collective"
)

_MANY = "works on many tensors in one call"
foreach_add_ = bind("torch._foreach_add_", _MANY)
foreach_copy_ = bind("torch._foreach_copy_", _MANY)
foreach_mul_ = bind("torch._foreach_mul_", _MANY)
foreach_norm = bind("torch._foreach_norm", _MANY)
foreach_zero_ = bind("torch._foreach_zero_", _MANY)
