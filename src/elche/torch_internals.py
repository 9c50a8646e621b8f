"""Private names of torch: every one that elche uses, and its fallback.

torch may rename what begins with an underscore in any release, so no other module of
elche names it. Each name is looked up here once, when this module is imported, so that
a call costs what it costs torch itself. Where torch has it no more, one warning says
what elche does instead: the same by public means, more work for the same gradient, or
an error as soon as something needs it.

``since`` is the oldest torch that was found to have the name; 2.0 is as far back as was
looked, and elche itself needs 2.9.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import get_worker_info

from elche.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Hooks = MutableMapping[int, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Internal:
    """A private name of torch.

    Attributes:
        name: where it is; ``()`` stands for an instance, whose attribute it is.
        since: oldest torch that was found to have it.
        used_for: why elche needs it.
        without: what elche does where torch has it no more.
        is_there: this torch has it.
    """

    name: str
    since: str
    used_for: str
    without: str
    is_there: bool


INTERNALS: list[Internal] = []
"""Every name that this module has looked up."""


def _lookup(name: str) -> Any:
    where, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(where.removesuffix("()"))
    return getattr(owner() if where.endswith("()") else owner, attribute)


def _bind(name: str, since: str, used_for: str, without: str, fallback: T) -> T:
    """What torch has under a name, or the fallback after a warning."""
    try:
        found: T = _lookup(name)
        is_there = True
    except (AttributeError, ImportError):
        found, is_there = fallback, False
        logger.warning(
            "torch %s has no %s (%s): %s", torch.__version__, name, used_for, without
        )
    INTERNALS.append(Internal(name, since, used_for, without, is_there))
    return found


def _has(name: str, since: str, used_for: str, without: str) -> bool:
    """Whether torch has a name, after a warning where it has not."""
    _bind(name, since, used_for, without, None)
    return INTERNALS[-1].is_there


REFUSED = "what needs it is refused"


def _refusing(name: str, instead: str = "") -> Callable[..., NoReturn]:
    """A fallback where nothing else would be right."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"expected a torch that has {name}, which elche needs here; torch "
            f"{torch.__version__} has it no more: install an older torch or a newer "
            f"elche{instead and ', or '}{instead}"
        )

    return refuse


# Backward passes.

_QUEUE = "torch.autograd.Variable._execution_engine.queue_callback"
queue_callback: Callable[[Callable[[], None]], None] = _bind(
    _QUEUE, "2.0", "calls back when a backward pass ends", REFUSED, _refusing(_QUEUE)
)

_NODE = "torch._C._current_autograd_node"
current_node: Callable[[], Any] = _bind(
    _NODE, "2.0", "tells a nested backward pass", REFUSED, _refusing(_NODE)
)
"""The node that autograd is in; None at the end of an outermost backward pass."""

_passes = itertools.count()


def _new_pass() -> int:
    """Another number whenever it is asked for, so that nobody relies on an old one."""
    try:
        queue_callback(_nothing)
    except RuntimeError:  # torch's answer outside of a backward pass
        return -1
    return next(_passes)


graph_task_id: Callable[[], int] = _bind(
    "torch._C._current_graph_task_id",
    "2.0",
    "tells backward passes apart",
    "every gradient is handled as if it were the first of its backward pass",
    _new_pass,
)
"""The number of the backward pass under way on this thread; -1 outside of one."""


def _public_backward(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *_: Any,
    **__: Any,
) -> None:
    torch.autograd.backward(outputs, gradients)


run_backward: Callable[..., Any] = _bind(
    "torch.autograd.graph._engine_run_backward",
    "2.3",
    "spares a pipeline's backward passes checks that it makes itself",
    "torch.autograd.backward takes its place, with these checks",
    _public_backward,
)
"""``(outputs, gradients, retain_graph, create_graph, inputs, *, allow_unreachable,
accumulate_grad)``: autograd's engine."""


_LOSSES = "sees that a loss is a sum"
_HAS_REDUCTION = _has(
    "torch._C._functions.NllLossBackward0._saved_reduction",
    "2.0",
    _LOSSES,
    "losses that are sums train as means unless loss_reduction says so",
)


def saved_reduction(node: Any) -> str:
    """How a node of autograd's graph that is torch's own loss reduces it, or ""."""
    saved = getattr(node, "_saved_reduction", None) if _HAS_REDUCTION else None
    return ("none", "mean", "sum")[saved] if saved in (0, 1, 2) else ""


def backward_roots(thread: int) -> tuple[torch.Tensor, ...]:
    """What a thread has called `torch.autograd.backward` with; () outside of it.

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


_HAS_NUMBER = _has(
    "torch.autograd.graph.Node._sequence_nr",
    "2.0",
    "tells that a graph is older than the batch in hand",
    "a backward pass after the next batch was asked for is not refused where forward "
    "passes are not seen",
)


def node_number(node: Any) -> int:
    """Counts the nodes of autograd's graph on the thread that made this one."""
    return int(node._sequence_nr()) if _HAS_NUMBER else 0


# Split backward passes of pipelines. Where one of these is missing, nothing is split:
# a full backward pass gives the same gradients.

_SPLIT = "splits a pipeline's backward pass"
_FULL = "pipelines run full backward passes"


def _unsure(*_: Any) -> bool:
    """The answer that lets nothing be deferred."""
    return True


saved_tensor_hooks: Callable[[bool], Any] = _bind(
    "torch._C._autograd._top_saved_tensors_default_hooks", "2.8", _SPLIT, _FULL, _unsure
)
in_functorch: Callable[[], bool] = _bind(
    "torch._C._are_functorch_transforms_active", "2.0", _SPLIT, _FULL, _unsure
)
in_autocast: Callable[[], bool] = _bind(
    "torch._C._is_any_autocast_enabled", "2.0", _SPLIT, _FULL, _unsure
)
in_function_mode: Callable[[], int] = _bind(
    "torch._C._len_torch_function_stack", "2.0", _SPLIT, _FULL, _unsure
)
_HAS_LEVEL = _has("torch.autograd.forward_ad._current_level", "2.0", _SPLIT, _FULL)


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0


in_forward_mode: Callable[[], bool] = _forward_mode if _HAS_LEVEL else _unsure

_IN_PROJECTIONS = ("_in_projection", "_in_projection_packed")
in_projections = {
    name: _bind(f"torch.nn.functional.{name}", "2.0", _SPLIT, _FULL, _unsure)
    for name in _IN_PROJECTIONS
}
"""Functions inside of attention that hold its first linear layers, by name."""
_HAS_HOOKS = _has("torch.Tensor._backward_hooks", "2.0", _SPLIT, _FULL)
_HAS_VERSION = _has(
    "torch.Tensor._version",
    "2.0",
    _SPLIT,
    f"{_FULL}, and tensors are copied again where a change would tell",
)
_has("torch._C._FunctionBase._register_hook_dict", "2.0", _SPLIT, _FULL)
_has("torch.nn.Module._compiled_call_impl", "2.1", _SPLIT, _FULL)
_has("torch.nn.functional.has_torch_function", "2.0", _SPLIT, _FULL)
CAN_SPLIT = all(each.is_there for each in INTERNALS if each.used_for == _SPLIT)
"""Whether weight gradients may be deferred with this torch."""


def catch_gradient(output: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> Any:
    """``Tensor.register_hook`` without its handle, which is most of what it costs.

    Only where :data:`CAN_SPLIT`.

    Returns:
        The node behind the output in autograd's graph.
    """
    node = output.grad_fn
    hooks: OrderedDict[Any, Any] = OrderedDict()
    hooks["ours"] = call
    output._backward_hooks = hooks
    node._register_hook_dict(output)  # type: ignore[union-attr]
    return node


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made a module, or ``module.compile()`` was called."""
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


# What tensors and modules hold.


def _nothing(*_: Any) -> None:
    """A hook that changes nothing."""


def hooks_seen_by(register: Callable[[Callable[..., Any]], Any]) -> Hooks:
    """The hooks beside one that is registered and removed again.

    Some microseconds, by public means.
    """
    handle = register(_nothing)
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
    if _has(
        "torch.Tensor._post_accumulate_grad_hooks",
        "2.1",
        "finds a user's hooks on parameters",
        _ASKED,
    )
    else _hooks_by("register_post_accumulate_grad_hook")
)
"""Hooks that run when a parameter's gradient has been accumulated, in their order."""

gradient_hooks: Callable[[torch.Tensor], Hooks | None] = (
    attrgetter("_backward_hooks") if _HAS_HOOKS else _hooks_by("register_hook")
)
"""Hooks on a parameter's gradient."""

version: Callable[[torch.Tensor], Any] = (
    attrgetter("_version") if _HAS_VERSION else lambda tensor: object()
)
"""Another value after every change in place; without it, whenever it is asked for."""


def _held(attribute: str) -> Callable[[nn.Module], dict[str, Any]]:
    name = f"torch.nn.Module().{attribute}"
    if _has(name, "2.0", "exchanges what modules hold", REFUSED):
        return attrgetter(attribute)
    return _refusing(name)


held_parameters = _held("_parameters")
held_buffers = _held("_buffers")
held_modules = _held("_modules")


def _unsaved(module: nn.Module) -> set[str]:
    named = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    return named.keys() - module.state_dict().keys()


unsaved_buffers: Callable[[nn.Module], set[str]] = (
    attrgetter("_non_persistent_buffers_set")
    if _has(
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
    BatchNormBase = _bind(
        "torch.nn.modules.batchnorm._BatchNorm",
        "2.0",
        "recognises BatchNorm of every dimension",
        f"of nn.BatchNorm1d, {_BASE}",
        nn.BatchNorm1d.__bases__[0],
    )
    NormBase = _bind(
        "torch.nn.modules.batchnorm._NormBase",
        "2.0",
        "recognises layers with running statistics",
        f"of BatchNorm layers, {_BASE}",
        BatchNormBase.__bases__[0],
    )

disable_dynamo: Callable[[T], T] = _bind(
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
    return _bind(
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


# Batches.

Leaf = Callable[[Any], bool]


def _map(call: Callable[[Any], Any], tree: Any, is_leaf: Leaf | None = None) -> Any:
    if is_leaf is not None and is_leaf(tree):
        return call(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(call, item, is_leaf) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(call, item, is_leaf) for item in tree)
    if type(tree) in (dict, OrderedDict):
        pairs = ((key, _map(call, item, is_leaf)) for key, item in tree.items())
        return type(tree)(pairs)
    return call(tree)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, tree)
    return found


_TREES = "looks into batches"
_PLAIN = "it looks into lists, tuples and dicts only"
tree_map: Callable[..., Any] = _bind(
    "torch.utils._pytree.tree_map", "2.0", _TREES, _PLAIN, _map
)
tree_leaves: Callable[[Any], list[Any]] = _bind(
    "torch.utils._pytree.tree_leaves", "2.2", _TREES, _PLAIN, _leaves
)


_FAKE = "torch._subclasses.FakeTensorMode"
FakeTensorMode: Any = _bind(
    _FAKE, "2.1", "cuts a model for a pipeline", REFUSED, _refusing(_FAKE)
)
"""Runs a model without computing, with sizes as symbols."""


def _moved(inputs: Any, kwargs: Any, device: torch.device, _: bool) -> tuple[Any, Any]:
    def is_moved(item: Any) -> bool:
        return isinstance(item, torch.Tensor | PackedSequence)

    def move(item: Any) -> Any:
        return item.to(device) if is_moved(item) else item

    return (_map(move, inputs, is_moved),), (_map(move, kwargs, is_moved),)


to_device: Callable[[Any, Any, torch.device, bool], tuple[Any, Any]] = _bind(
    "torch.distributed.utils._to_kwargs",
    "2.0",
    "moves a wrapper's inputs to its device as torch's does",
    f"they are copied on the current stream, and {_PLAIN}",
    _moved,
)
"""``(inputs, kwargs, device, on a stream of their own)``; each is moved, in a list."""

_HAS_WORKER_INFO = _has(
    "torch.utils.data._utils.worker._worker_info",
    "2.0",
    "hides from a stream which loader worker reads it",
    "streams are refused in loader workers",
)


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """Meanwhile `torch.utils.data.get_worker_info` knows of no worker.

    Raises:
        ConfigError: it cannot be hidden with this torch.
    """
    info = get_worker_info()
    if info is None:
        yield
        return
    if not _HAS_WORKER_INFO:
        _refusing("torch.utils.data._utils.worker._worker_info", "set num_workers=0")()
    worker: Any = sys.modules[get_worker_info.__module__]
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info


# Process groups.

_TIMEOUT = "torch._C._distributed_c10d.Backend.Options._timeout"
_GLOO = "torch.distributed.ProcessGroupGloo._Options"
_BACKEND = "torch.distributed.ProcessGroup._get_backend"
_HAS_TIMEOUT = _has(_TIMEOUT, "2.0", "sets and reads a group's deadline", REFUSED)
_FOR_GLOO = {_TIMEOUT: _HAS_TIMEOUT} | {
    name: _has(name, "2.0", "has gloo listen on one address only", REFUSED)
    for name in (_GLOO, f"{_GLOO}._devices", f"{_GLOO}._threads")
}
_HAS_BACKEND = _has(
    _BACKEND,
    "2.0",
    "reads a group's deadline",
    "give DistributedDataParallel timeout_s",
)


def gloo_options(timeout: timedelta, listen: str) -> Any:
    """Options of a gloo group whose ranks listen on one address."""
    if missing := [name for name, is_there in _FOR_GLOO.items() if not is_there]:
        _refusing(missing[0])()
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=listen)]
    options._threads = 2
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Options of an NCCL group."""
    if not _HAS_TIMEOUT:
        _refusing(_TIMEOUT)()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def group_timeout_s(process_group: Any) -> float | None:
    """The deadline that a group of the user's was made with; None: not to be found."""
    for device in ("cpu", "cuda") if _HAS_TIMEOUT and _HAS_BACKEND else ():
        with contextlib.suppress(RuntimeError, AttributeError):
            options = process_group._get_backend(torch.device(device)).options
            return float(options._timeout.total_seconds())
    return None


# Names that torch looks for, in what elche hands to it. Nothing tells whether it does.

PARAMETER_MARK = "_is_param"
"""Set to True, makes a tensor an instance of `nn.Parameter`. Without it a module that
asks takes a deferred weight for a plain tensor. Since 2.0."""

SCALER_FLAG = "_step_supports_amp_scaling"
"""What a GradScaler asks an optimizer before it steps; elche refuses a scaler there
that has no gradients to work on. Without it the scaler ends the run itself, by an
assertion. Since 2.0."""

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""What a module names that torch's wrapper is to leave alone; elche's reads it too.
Without it elche's wrapper goes on doing so. Since 2.0."""

STEPPED_IN_BACKWARD = "_in_backward_optimizers"
"""What torch sets on a parameter that `_apply_optimizer_in_backward` steps, which elche
refuses. Without it such a parameter would go unseen. Since 2.0."""

COMPILED_MODULE = "_orig_mod"
"""Where `torch.compile` puts the module that it was given, and so a part of the names
in its state dict. Without it a checkpoint's model has the names as they come. Since
2.0."""

STATE_VERSIONS = "_metadata"
"""On a module's state dict: versions of its layers' formats. Without it a checkpoint
has none, and layers load as of their first version. Since 1.0."""
