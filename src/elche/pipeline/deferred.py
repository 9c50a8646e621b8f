"""Weights whose gradient is computed later than that of the activation.

While a stage runs forward, its parameters are replaced by :class:`DeferredWeight`
views. They cost operations without a parameter nothing; an operation that
`elche.pipeline.recognition` knows runs as :class:`_DeferredFunction`, whose backward
computes the gradient of the activation and keeps what the weight's needs in a
:class:`WeightGradients`. Anything else gets the parameter itself, and autograd computes
its gradient with that of the activations.

The idea of a store of weight gradients is that of zero-bubble pipelines (Qi et al.,
ICLR 2024); theirs knows linear layers of Megatron only.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.operations import WeightOperation
from elche.pipeline.recognition import VIEWS, Recognised, rules


class Entry(NamedTuple):
    """What a weight gradient needs."""

    operation: WeightOperation
    weight: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    version: int
    grad: torch.Tensor


class Site(NamedTuple):
    """Where a weight was used in forward, and the node behind it in the graph."""

    node: Any
    weight: torch.Tensor
    bias: torch.Tensor | None


@final
class WeightGradients:
    """Weight gradients of a stage that wait for their time.

    Attributes:
        deferred_flops: of all that was computed here so far.
        sites: uses of weights in the forward under way.
    """

    def __init__(self) -> None:
        self.deferred_flops = 0
        self.sites: list[Site] = []
        self._open: list[Entry] | None = None
        self._waiting: dict[int, list[Entry]] = {}

    @contextmanager
    def collect(self, microbatch: int) -> Iterator[None]:
        """Keeps what backward defers meanwhile, under a microbatch."""
        self._open = self._waiting.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._open = None

    def add(self, entry: Entry) -> None:
        """Keeps one.

        Raises:
            ConfigError: the stage itself calls autograd in its forward.
        """
        if self._open is None:
            raise ConfigError(
                "the stage differentiates in its own forward, where its weights' "
                "gradients cannot be deferred; take a schedule that does not split "
                "backward (1f1b, gpipe), or PipelineConfig(split_backward=False)"
            )
        self._open.append(entry)

    def waiting_for(self, microbatch: int) -> list[torch.Tensor]:
        """Weights and biases whose gradient a microbatch still owes."""
        entries = self._waiting.get(microbatch, ())
        weights = [entry.weight for entry in entries]
        return weights + [entry.bias for entry in entries if entry.bias is not None]

    def compute(self, microbatch: int) -> list[torch.Tensor]:
        """Computes what waits for a microbatch, into ``grad`` of the parameters.

        Returns:
            The parameters that got a contribution here and not through autograd.
        """
        touched: list[torch.Tensor] = []
        derived: _Derived = {}
        with torch.no_grad():
            for entry in self._waiting.pop(microbatch, ()):
                _check_version(entry)
                self.deferred_flops += entry.operation.flops(entry.grad, entry.weight)
                _accumulate_weight(entry, touched, derived)
                if entry.bias is not None:
                    value = entry.operation.bias_gradient(entry.grad)
                    _accumulate(entry.bias, value, touched, derived)
        if derived:
            tensors, gradients = zip(*derived.values(), strict=True)
            torch.autograd.backward(tensors, gradients)
        return touched

    def discard(self) -> None:
        """Forgets all that waits."""
        self._waiting.clear()
        self.sites = []


def _check_version(entry: Entry) -> None:
    if entry.x._version != entry.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified "
            f"by an inplace operation: the input of a weight of shape "
            f"{list(entry.weight.shape)} was changed after its use"
        )


_Derived = dict[int, tuple[torch.Tensor, torch.Tensor]]


def _accumulate_weight(
    entry: Entry, touched: list[torch.Tensor], derived: _Derived
) -> None:
    weight = entry.weight
    into = weight.grad if weight.is_leaf else None
    if into is not None and into.dtype == entry.grad.dtype == entry.x.dtype:
        entry.operation.add_weight_gradient(entry.grad, entry.x, into)
        touched.append(weight)
        return
    value = entry.operation.weight_gradient(entry.grad, entry.x, weight.shape)
    _accumulate(weight, value, touched, derived)


def _accumulate(
    target: torch.Tensor,
    value: torch.Tensor,
    touched: list[torch.Tensor],
    derived: _Derived,
) -> None:
    value = value.to(target.dtype)
    if not target.is_leaf:
        if id(target) in derived:
            value = derived[id(target)][1] + value
        derived[id(target)] = (target, value)
        return
    if target.grad is None:
        target.grad = value
    else:
        target.grad.add_(value)
    touched.append(target)


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
        ctx.store.add(Entry(ctx.operation, ctx.weight, bias, x, x._version, grad))
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

    _is_param = True  # what nn.Parameter looks at in isinstance
    origin: torch.Tensor
    used: torch.Tensor
    store: WeightGradients

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
            if rule is not None and not torch._C._are_functorch_transforms_active():
                done = _run(rule(*args, **kwargs))
                if done is not None:
                    return done
            elif func in VIEWS:
                return _view(func, args, kwargs)
            elif func in _COMPOSITES:
                return _COMPOSITES[func](*args, **kwargs)
        return func(*_plain(args), **_plain(kwargs))


def defer(weight: torch.Tensor, store: WeightGradients) -> DeferredWeight:
    """A view of a weight that puts its gradients off into a store."""
    made = weight.as_subclass(DeferredWeight)
    made.origin, made.used = weight, weight.detach()
    made.store = store
    return made


def may_defer(parameter: nn.Parameter) -> bool:
    """Whether nobody would notice that autograd does not see this gradient.

    Hooks of a user on the parameter would; those of an object that says
    ``only_counts`` do not matter.
    """
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    owners = (getattr(hook, "__self__", None) for hook in after.values())
    return (
        parameter.requires_grad
        and type(parameter) is nn.Parameter
        and parameter.is_floating_point()
        and parameter.layout is torch.strided
        and not parameter._backward_hooks
        and all(getattr(owner, "only_counts", False) for owner in owners)
    )


def _is_weight(value: Any) -> bool:
    return type(value) is DeferredWeight


_saved_tensors_have_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_RULES = rules(_is_weight)


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
    weight, used, store = stand_in.origin, stand_in.used, stand_in.store
    if x.is_floating_point():
        if torch.is_autocast_enabled(x.device.type):
            x, used, used_bias = _autocast(x, used, used_bias)
        if x.dtype != used.dtype:
            return None  # torch's own complaint is the best
    if not x.requires_grad or _saved_tensors_have_hooks(True):
        made: torch.Tensor = _DeferredFunction.apply(  # type: ignore[no-untyped-call]
            store, operation, x, (used, used_bias), weight, bias
        )
    else:
        made = operation.forward(x, used, used_bias)
        learning = _learning(bias)
        made.register_hook(_Keeper(store, operation, weight, learning, x))
    store.sites.append(Site(made.grad_fn, weight, _learning(bias)))
    return made


class _Keeper:
    """Keeps the gradient of an operation's output, and the input that goes with it."""

    __slots__ = ("_bias", "_operation", "_store", "_version", "_weight", "_x")

    def __init__(
        self,
        store: WeightGradients,
        operation: WeightOperation,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
    ) -> None:
        self._store, self._operation = store, operation
        self._weight, self._bias = weight, bias
        self._x, self._version = x.detach(), x._version

    def __call__(self, grad: torch.Tensor) -> None:
        self._store.add(
            Entry(
                self._operation, self._weight, self._bias, self._x, self._version, grad
            )
        )


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
        return value.origin if type(value) is DeferredWeight else value
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_plain(one) for one in value)
    return value


def _nothing_overrides(*_: Any) -> bool:
    return False


def _seen_through(function: Any) -> Any:
    """A function of torch.nn.functional that lets its inner calls be seen.

    Such functions hand themselves over as a whole when an argument has a type of its
    own; this copy looks away and goes on, so that its linear layers are found.
    """
    inside = {**function.__globals__, "has_torch_function": _nothing_overrides}
    made = types.FunctionType(
        function.__code__, inside, function.__name__, function.__defaults__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_COMPOSITES = {
    F.multi_head_attention_forward: _seen_through(F.multi_head_attention_forward)
}
