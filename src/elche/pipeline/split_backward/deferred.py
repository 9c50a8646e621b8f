"""Weights whose gradient is computed later than that of the activation.

While a stage runs forward, its parameters are replaced by :class:`DeferredWeight`
views. They cost operations without a parameter nothing; an operation that
`elche.pipeline.split_backward.recognition` knows runs without its weight in autograd's
graph, and a :class:`~elche.pipeline.split_backward.weight_gradients.Site` keeps what
the weight's gradient needs. Anything else gets the parameter itself, and autograd
computes its gradient with that of the activations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

from elche.pipeline.split_backward.operations import WeightOperation
from elche.pipeline.split_backward.recognition import LINEAR, VIEWS, Recognised, rules
from elche.pipeline.split_backward.seen_through import seen_through
from elche.pipeline.split_backward.weight_gradients import Site, WeightGradients
from elche.torch_internals.groups import PARAMETER_MARK
from elche.torch_internals.held import (
    accumulated_hooks,
    gradient_hooks,
    hooks_seen_by,
    version,
)
from elche.torch_internals.passes import (
    in_autocast,
    in_forward_mode,
    in_function_mode,
    in_functorch,
    in_projections,
    saved_tensor_hooks,
)

__all__ = [
    "DeferredWeight",
    "Site",
    "WeightGradients",
    "defer",
    "linear",
    "may_defer",
    "multi_head_attention",
]


class _DeferredFunction(torch.autograd.Function):
    """An operation with a weight whose input autograd has to keep, or has not.

    For activations that need no gradient, and where hooks on saved tensors are set, as
    checkpointing does: it saves the input as any function of torch does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        store: WeightGradients,
        operation: WeightOperation,
        x: torch.Tensor,
        used: tuple[torch.Tensor, torch.Tensor | None],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.store, ctx.operation = store, operation
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(x, used[0])
        return operation.forward(x, *used)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, used = ctx.saved_tensors
        bias = _learning(ctx.bias)
        site = Site(ctx.operation, ctx.weight, bias, x, version(x))
        site.grads.append(grad)
        ctx.store.add(site)
        needed = ctx.needs_input_grad[2]
        dx = ctx.operation.input_gradient(grad, x, used) if needed else None
        return None, None, dx, None, None, None


def _learning(bias: torch.Tensor | None) -> torch.Tensor | None:
    return bias if bias is not None and bias.requires_grad else None


@final
class DeferredWeight(torch.Tensor):
    """A parameter, or a view of one, as a stage's forward sees it.

    Made by :func:`defer`. It is connected to the parameter in autograd's graph, so a
    function that torch does not let us see still gives the right gradient.
    """

    origin: torch.Tensor
    used: torch.Tensor
    store: WeightGradients
    is_matrix: bool

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the parameter; attention asks for it often, and by torch it takes long."""
        return self.used.dtype

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs a torch function that has such a weight among its arguments."""
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            rule = _RULES.get(func)
            if rule is not None and not in_functorch() and not in_forward_mode():
                done = _run(rule(*args, **kwargs))
                if done is not None:
                    return done
            elif func in VIEWS:
                return _view(func, args, kwargs)
            elif func in _COMPOSITES:
                return _COMPOSITES[func](*args, **kwargs)
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is DeferredWeight:
            return copy.deepcopy(_plain(args[0]), args[1])  # a parameter's own way
        made = func(*_plain(args), **_plain(kwargs))
        if func == _SET_DATA and type(args[0]) is DeferredWeight:
            args[0].used = args[0].origin.detach()
        return made


setattr(DeferredWeight, PARAMETER_MARK, True)


def defer(weight: torch.Tensor, store: WeightGradients) -> DeferredWeight:
    """A view of a weight that puts its gradients off into a store."""
    made = weight.as_subclass(DeferredWeight)
    made.origin, made.used = weight, weight.detach()
    made.store, made.is_matrix = store, weight.dim() == 2
    return made


def may_defer(parameter: nn.Parameter) -> bool:
    """Whether nobody would notice that autograd does not see this gradient.

    Hooks of a user on the parameter would; those of an object that says
    ``only_counts`` do not matter.
    """
    after = accumulated_hooks(parameter) or {}
    owners = (getattr(hook, "__self__", None) for hook in after.values())
    return (
        parameter.requires_grad
        and type(parameter) is nn.Parameter
        and parameter.is_floating_point()
        and parameter.layout is torch.strided
        and not gradient_hooks(parameter)
        and all(getattr(owner, "only_counts", False) for owner in owners)
    )


def has_node_hooks(parameter: nn.Parameter) -> bool:
    """Whether a user has put hooks where autograd accumulates a parameter's gradient.

    torch tells only who registers another one; it takes some microseconds.
    """
    node = get_gradient_edge(parameter).node
    return any(map(hooks_seen_by, (node.register_prehook, node.register_hook)))


def _is_weight(value: Any) -> bool:
    return type(value) is DeferredWeight


_torch_linear = F.linear
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_RULES = rules(_is_weight)


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear``, for callers that may hold a deferred weight.

    The common case without torch's way of finding out that a weight is ours.
    """
    if type(weight) is not DeferredWeight or not torch.is_grad_enabled():
        return F.linear(input, weight, bias)
    used_bias, learns = bias, None
    if type(bias) is DeferredWeight:
        used_bias, learns = bias.used, bias.origin
    if (
        type(input) is not torch.Tensor
        or not input.requires_grad
        or not weight.is_matrix
        or (bias is not None and (learns is None or learns.dim() != 1))
        or F.linear is not _torch_linear
        or weight.store.is_open
        or in_function_mode()
        or in_forward_mode()
        or input.dtype is not weight.used.dtype
        or in_autocast()
        or in_functorch()
        or saved_tensor_hooks(True)
    ):
        return F.linear(input, weight, bias)
    x = LINEAR.kept(input, weight)
    made = F.linear(x, weight.used, used_bias)
    site = Site(LINEAR, weight.origin, learns, x.detach(), version(x))
    site.catch(made)
    weight.store.sites.append(site)
    return made if x is input else made.view(*input.shape[:-1], made.shape[-1])


def _run(found: Recognised | None) -> torch.Tensor | None:
    """Runs a recognised call; None if its gradient cannot be deferred."""
    if found is None:
        return None
    operation, x, bias = found.operation, found.x, found.bias
    stand_in = found.weight
    if not isinstance(stand_in, DeferredWeight) or isinstance(x, DeferredWeight):
        return None
    used_bias = bias
    if isinstance(bias, DeferredWeight):
        used_bias, bias = bias.used, bias.origin
    elif bias is not None and bias.requires_grad:
        return None
    if bias is not None and bias.dim() != 1:
        return None
    used = stand_in.used
    if x.is_floating_point():
        if in_autocast() and torch.is_autocast_enabled(x.device.type):
            x, used, used_bias = _autocast(x, used, used_bias)
        if x.dtype != used.dtype:
            return None  # torch's own complaint is the best
    rows = operation.kept(x, used)
    made = _deferring(operation, rows, (used, used_bias), stand_in, bias)
    return made if rows is x else made.view(*x.shape[:-1], made.shape[-1])


def _deferring(
    operation: WeightOperation,
    x: torch.Tensor,
    used: tuple[torch.Tensor, torch.Tensor | None],
    stand_in: DeferredWeight,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Runs an operation and notes where its gradients come from."""
    weight, store = stand_in.origin, stand_in.store
    has_hooks = saved_tensor_hooks(True) is not None
    store.runs_again |= has_hooks
    # What runs again in backward must come after hooks that a user puts on the output.
    if has_hooks or store.is_open or not x.requires_grad:
        made: torch.Tensor = _DeferredFunction.apply(  # type: ignore[no-untyped-call, unused-ignore]
            store, operation, x, used, weight, bias
        )
        site = Site(operation, weight, _learning(bias), None, 0)
        site.node = made.grad_fn
    else:
        made = operation.forward(x, *used)
        site = Site(operation, weight, _learning(bias), x.detach(), version(x))
        site.catch(made)
    store.sites.append(site)
    return made


def _autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments as autocast would hand them to the operation."""
    dtype = torch.get_autocast_dtype(x.device.type)
    if torch.float64 in (x.dtype, weight.dtype):
        return x, weight, bias
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a weight is one that is deferred, too."""
    made = func(*_plain(args), **_plain(kwargs))
    source = args[0] if args else None
    if type(source) is not DeferredWeight:
        return made
    if isinstance(made, torch.Tensor):
        return _derived(made, source.store)
    return type(made)(_derived(one, source.store) for one in made)


def _derived(made: torch.Tensor, store: WeightGradients) -> torch.Tensor:
    if not made.is_floating_point() or not made.requires_grad:
        return made
    return defer(made, store)


def _plain(value: Any) -> Any:
    """Arguments with parameters in the place of their stand-ins."""
    if isinstance(value, torch.Tensor):
        if type(value) is not DeferredWeight:
            return value
        if not torch.is_grad_enabled():
            value.store.runs_again = True  # a checkpoint's first forward, perhaps
        return value.origin
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_plain(one) for one in value)
    return value


_projections: dict[str, Any] = {
    name: seen_through(function, linear=linear)
    for name, function in in_projections.items()
}
multi_head_attention = seen_through(
    F.multi_head_attention_forward, linear=linear, **_projections
)
"""``F.multi_head_attention_forward`` whose linear layers are found."""
_COMPOSITES = {F.multi_head_attention_forward: multi_head_attention}
