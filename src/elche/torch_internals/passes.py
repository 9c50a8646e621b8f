"""Backward passes, and pipelines' split ones."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.torch_internals.lookup import (
    INTERNALS,
    REFUSED,
    bind,
    has,
    nothing,
    refusing,
)

_QUEUE = "torch.autograd.Variable._execution_engine.queue_callback"
queue_callback: Callable[[Callable[[], None]], None] = bind(
    _QUEUE, "2.0", "calls back when a backward pass ends", REFUSED, refusing(_QUEUE)
)

_NODE = "torch._C._current_autograd_node"
current_node: Callable[[], Any] = bind(
    _NODE, "2.0", "tells a nested backward pass", REFUSED, refusing(_NODE)
)
"""The node that autograd is in; None at the end of an outermost backward pass."""

_passes = itertools.count()


def _new_pass() -> int:
    """Another number whenever it is asked for, so that nobody relies on an old one."""
    try:
        queue_callback(nothing)
    except RuntimeError:  # torch's answer outside of a backward pass
        return -1
    return next(_passes)


graph_task_id: Callable[[], int] = bind(
    "torch._C._current_graph_task_id",
    "2.0",
    "tells backward passes apart",
    "every gradient is handled as if it were the first of its backward pass",
    _new_pass,
)
"""The number of the backward pass under way on this thread; -1 outside of one."""


_LOSSES = "sees that a loss is a sum"
_HAS_REDUCTION = has(
    "torch._C._functions.NllLossBackward0._saved_reduction",
    "2.0",
    _LOSSES,
    "losses that are sums train as means unless loss_reduction says so",
)


def saved_reduction(node: Any) -> str:
    """Reduction of a node of autograd's graph that is torch's own loss, or ""."""
    saved = getattr(node, "_saved_reduction", None) if _HAS_REDUCTION else None
    return ("none", "mean", "sum")[saved] if saved in (0, 1, 2) else ""


def mean_of_targets(node: Any) -> tuple[bool, int] | None:
    """Class weights of a mean NLL loss (True: some), and the target that it ignores."""
    ignored = getattr(node, "_saved_ignore_index", None)
    if ignored is None or saved_reduction(node) != "mean":
        return None
    try:
        has_weights = node._saved_weight is not None
    except RuntimeError:  # freed, so there were some
        has_weights = True
    return has_weights, ignored - (1 << 64) if ignored >> 63 else ignored


def backward_roots(thread: int) -> tuple[torch.Tensor, ...]:
    """Arguments of a thread's `torch.autograd.backward`; () outside of it.

    Of nested passes the outermost. Devices run hooks in threads of their own, while the
    one that called waits.
    """
    frame = sys._current_frames().get(thread)
    roots: Any = ()
    while frame is not None:
        if frame.f_code is getattr(torch.autograd.backward, "__code__", None):
            roots = frame.f_locals["tensors"]
        frame = frame.f_back
    return (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)


# Split backward passes of pipelines. Where one of these is missing, nothing is split:
# a full backward pass gives the same gradients.

_SPLIT = "splits a pipeline's backward pass"
_FULL = "pipelines run full backward passes"


def _unsure(*_: Any) -> bool:
    """The answer that lets nothing be deferred."""
    return True


in_functorch: Callable[[], bool] = bind(
    "torch._C._are_functorch_transforms_active", "2.0", _SPLIT, _FULL, _unsure
)
function_modes: Callable[[], int] = bind(
    "torch._C._len_torch_function_stack", "2.0", _SPLIT, _FULL, _unsure
)
"""Number of the function modes that are active; a default device is one."""
is_in_backward: Callable[[Any], bool] = bind(
    "torch._C._will_engine_execute_node", "2.0", _SPLIT, _FULL, _unsure
)
"""The backward pass under way comes to a node: `torch.autograd.grad` leaves some out.

Only within a backward pass."""
_PROJECTIONS = {
    name: bind(f"torch.nn.functional.{name}", "2.0", _SPLIT, _FULL, _unsure)
    for name in ("_in_projection", "_in_projection_packed")
}
"""Functions inside of attention that hold its first linear layers."""
HAS_VERSION = has(
    "torch.Tensor._version",
    "2.0",
    _SPLIT,
    f"{_FULL}, and tensors are copied again where a change would tell",
)
has("torch.nn.Module._compiled_call_impl", "2.1", _SPLIT, _FULL)
CAN_SPLIT = all(each.is_there for each in INTERNALS if each.used_for == _SPLIT)
"""True if weight gradients may be deferred with this torch."""


def attention_with(linear: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`nn.MultiheadAttention.forward` with a function in the place of `F.linear`.

    All else of it, masks and kernels, is torch's own code of this version.
    """
    inside = {name: _copied(f, linear=linear) for name, f in _PROJECTIONS.items()}
    attend = _copied(F.multi_head_attention_forward, linear=linear, **inside)
    functions = {**vars(F), "multi_head_attention_forward": attend}
    return _copied(nn.MultiheadAttention.forward, F=types.SimpleNamespace(**functions))


def _copied(function: Any, **replaced: Any) -> Callable[..., Any]:
    """A copy of a Python function that sees other values under global names."""
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def is_compiled(module: nn.Module) -> bool:
    """True if ``torch.compile`` made a module, or ``module.compile()`` was called."""
    is_made = type(module).__name__ == "OptimizedModule"
    return is_made or getattr(module, "_compiled_call_impl", None) is not None


def mark_dynamic(tensor: torch.Tensor) -> None:
    """Tells Dynamo that a tensor's first dimension varies, if it is imported.

    Dynamo compiles for any size at once then, and not first for the one it sees. A mark
    that it cannot follow is no error. Where torch has no such function any more, Dynamo
    compiles once more when the size first changes.
    """
    dynamo = sys.modules.get("torch._dynamo")
    mark = getattr(dynamo, "maybe_mark_dynamic", None)
    if mark is not None and tensor.dim():
        mark(tensor, 0)


_FAKE = "torch._subclasses.FakeTensorMode"
FakeTensorMode: Any = bind(
    _FAKE, "2.1", "cuts a model for a pipeline", REFUSED, refusing(_FAKE)
)
"""Runs a model without computing, with sizes as symbols."""
