"""Private names for backward passes, and for pipelines' split backward passes."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.torch_internals.lookup import bind

queue_callback: Callable[[Callable[[], None]], None] = bind(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "calls back when a backward pass ends",
)

current_node: Callable[[], Any] = bind(
    "torch._C._current_autograd_node", "tells a nested backward pass"
)
"""Autograd node being executed; None at the end of an outermost backward pass."""

graph_task_id: Callable[[], int] = bind(
    "torch._C._current_graph_task_id", "tells backward passes apart"
)
"""ID of this thread's current backward pass; -1 outside of one."""


def saved_reduction(node: Any) -> str:
    """Reduction ("none", "mean", "sum") of a torch loss's autograd node; else ""."""
    saved = getattr(node, "_saved_reduction", None)
    return ("none", "mean", "sum")[saved] if saved in (0, 1, 2) else ""


def mean_of_targets(node: Any) -> tuple[bool, int] | None:
    """(True if weighted by class, ignored target) of a mean NLL loss; else None."""
    ignored = getattr(node, "_saved_ignore_index", None)
    if ignored is None or saved_reduction(node) != "mean":
        return None
    try:
        has_weights = node._saved_weight is not None
    except RuntimeError:  # the saved weights were freed, so there were some
        has_weights = True
    return has_weights, ignored - (1 << 64) if ignored >> 63 else ignored


def backward_roots(thread: int) -> tuple[torch.Tensor, ...]:
    """Tensors passed to a thread's `torch.autograd.backward`; () outside of it.

    Nested passes return the outermost call's tensors. Takes a thread, because devices
    run hooks in their own threads while the calling thread waits.
    """
    frame = sys._current_frames().get(thread)
    roots: Any = ()
    while frame is not None:
        if frame.f_code is getattr(torch.autograd.backward, "__code__", None):
            roots = frame.f_locals["tensors"]
        frame = frame.f_back
    return (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)


_SPLIT = "splits a pipeline's backward pass"
in_functorch: Callable[[], bool] = bind(
    "torch._C._are_functorch_transforms_active", _SPLIT
)
function_modes: Callable[[], int] = bind("torch._C._len_torch_function_stack", _SPLIT)
"""Number of active function modes; a default device counts as one."""
is_in_backward: Callable[[Any], bool] = bind(
    "torch._C._will_engine_execute_node", _SPLIT
)
"""True if the current backward pass executes a node; `torch.autograd.grad` skips some.

Callable only within a backward pass."""
_PROJECTIONS = {
    name: bind(f"torch.nn.functional.{name}", _SPLIT)
    for name in ("_in_projection", "_in_projection_packed")
}
"""Functions that apply attention's input projections."""


def attention_with(linear: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Returns `nn.MultiheadAttention.forward` with `F.linear` replaced.

    All other code, with its masks and kernels, is the installed torch's.
    """
    inside = {name: _copied(f, linear=linear) for name, f in _PROJECTIONS.items()}
    attend = _copied(F.multi_head_attention_forward, linear=linear, **inside)
    functions = {**vars(F), "multi_head_attention_forward": attend}
    return _copied(nn.MultiheadAttention.forward, F=types.SimpleNamespace(**functions))


def _copied(function: Any, **replaced: Any) -> Callable[..., Any]:
    """Returns a copy of a Python function with some of its globals replaced."""
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def is_compiled(module: nn.Module) -> bool:
    """True if a module was compiled by ``torch.compile`` or ``module.compile()``."""
    is_made = type(module).__name__ == "OptimizedModule"
    return is_made or getattr(module, "_compiled_call_impl", None) is not None


def mark_dynamic(tensor: torch.Tensor) -> None:
    """Marks a tensor's first dimension as dynamic for Dynamo, if it is imported.

    Dynamo then compiles for all sizes at once, not for the first size alone. It ignores
    a mark that it cannot honor. If torch has dropped the function, Dynamo compiles once
    more when the size first changes.
    """
    dynamo = sys.modules.get("torch._dynamo")
    mark = getattr(dynamo, "maybe_mark_dynamic", None)
    if mark is not None and tensor.dim():
        mark(tensor, 0)


_CUT = "cuts a model for a pipeline"
FakeTensorMode: Any = bind("torch._subclasses.FakeTensorMode", _CUT)
"""Mode that runs a model without computing, with symbolic sizes."""
unset_fake_temporarily: Any = bind(
    "torch._subclasses.fake_tensor.unset_fake_temporarily", _CUT
)
"""Context in which tensors are real again."""
