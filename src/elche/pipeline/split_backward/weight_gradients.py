"""Deferred weight gradients of a stage.

:func:`defer` runs an operation as one node of autograd's graph, whose backward computes
the gradient of the activation and keeps what the gradient of the weight needs. The idea
is that of zero-bubble pipelines (Qi et al., ICLR 2024). A weight gradient is added
straight to ``weight.grad`` in one product, where autograd makes the product first and
adds it then.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch.autograd import forward_ad

from elche.errors import ConfigError
from elche.pipeline.split_backward.operations import WeightOperation
from elche.torch_internals.held import version
from elche.torch_internals.passes import function_modes, in_functorch, is_in_backward

_Views: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Views of parameters with their gradients."""


class Site(NamedTuple):
    """One use of a weight, with all that its gradient needs.

    Attributes:
        operation: the computation.
        weight: the parameter, or a view of it.
        bias: likewise; None where there is none that learns.
        x: the input.
        version: of the input's memory when the gradient of the output came.
        grad: the gradient of the output.
    """

    operation: WeightOperation
    weight: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    version: int
    grad: torch.Tensor

    @property
    def owed(self) -> list[torch.Tensor]:
        """The tensors whose gradient is still to be computed."""
        return [one for one in (self.weight, self.bias) if one is not None]


@final
class WeightGradients:
    """Weight gradients of a stage that wait for their time.

    Attributes:
        computed: number of deferred weight gradients so far.
    """

    def __init__(self) -> None:
        self.computed = 0
        self._open: list[Site] | None = None
        self._waiting: dict[int, list[Site]] = {}

    def open(self, microbatch: int) -> None:
        """Begins to keep what the backward of a microbatch defers."""
        self._open = self._waiting.setdefault(microbatch, [])

    def close(self) -> None:
        """Ends what `open` has begun, also after an error."""
        self._open = None

    def add(self, site: Site) -> None:
        """Keeps one whose output has its gradient.

        Raises:
            ConfigError: the stage or the loss function calls autograd itself.
        """
        if self._open is None:
            raise _differentiates_inside()
        self._open.append(site)

    def waiting_for(self, microbatch: int) -> list[torch.Tensor]:
        """Weights and biases whose gradient of a microbatch is still deferred."""
        return [one for site in self._waiting.get(microbatch, ()) for one in site.owed]

    def compute(self, microbatch: int) -> None:
        """Computes what waits for a microbatch, into ``grad`` of the parameters.

        The first operation of the forward comes first: its gradient was the last to be
        made and may still be in the cache. Each is dropped as soon as it is done.
        """
        views: _Views = []
        waiting = self._waiting.pop(microbatch, [])
        with torch.no_grad():
            while waiting:
                self._settle(waiting.pop(), views)
        if views:
            tensors, gradients = zip(*views, strict=True)
            torch.autograd.backward(tensors, gradients)

    def discard(self) -> None:
        """Forgets all that waits."""
        self._waiting.clear()

    def _settle(self, site: Site, views: _Views) -> None:
        operation, grad, weight = site.operation, site.grad, site.weight
        if version(site.x) != site.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been "
                "modified by an inplace operation: the input of a weight of shape "
                f"{list(weight.shape)} was changed after its use"
            )
        self.computed += 1
        value = operation.weight_gradient(grad, site.x, weight.shape)
        into = weight.grad if weight.is_leaf else None
        if isinstance(value, torch.Tensor):
            _accumulate(weight, value, views)
        elif into is not None and into.dtype == grad.dtype == site.x.dtype:
            into.addmm_(*value)  # one product that adds to what is there
        else:
            _accumulate(weight, torch.mm(*value), views)
        if site.bias is not None:
            _accumulate(site.bias, operation.bias_gradient(grad), views)


def _accumulate(target: torch.Tensor, value: torch.Tensor, views: _Views) -> None:
    # A bias may be one element for all.
    value = value.to(target.dtype).sum_to_size(target.shape)
    if not target.is_leaf:
        views.append((target, value))
    elif target.grad is None:
        target.grad = value
    else:
        target.grad.add_(value)


def defer(
    store: WeightGradients,
    operation: WeightOperation,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """Runs an operation whose weight gradient waits in a store.

    Args:
        store: of the stage.
        operation: the computation.
        x: the activation, or indices.
        weight: a parameter that learns, or a view of one.
        bias: of the same type.

    Returns:
        The output; None where only autograd knows what is right.
    """
    if (
        not (torch.is_grad_enabled() and weight.requires_grad)
        or torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or (function_modes() and not _has_device_alone())
        or in_functorch()
        or x.layout is not torch.strided
        or x.is_nested
        or forward_ad.unpack_dual(x).tangent is not None
    ):
        return None
    used = weight.dtype
    if x.is_floating_point():
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and torch.float64 not in (x.dtype, used):
            used = torch.get_autocast_dtype(kind)
            x = x.to(used)
        elif x.dtype != used:
            return None  # torch's own complaint is the best
    is_flat = not operation.takes_rows or x.dim() == 2
    rows = x if is_flat else x.reshape(-1, x.shape[-1])
    made: torch.Tensor = _Deferred.apply(  # type: ignore[no-untyped-call, unused-ignore]
        rows, weight, bias, used, operation, store
    )
    # Outside of the function: autograd forbids changes of its views in place.
    return made if is_flat else made.view(*x.shape[:-1], made.shape[-1])


def _has_device_alone() -> bool:
    """True if the default device is the only function mode: it changes nothing here."""
    return function_modes() == 1 and torch.get_default_device().type != "cpu"


class _Deferred(torch.autograd.Function):
    """An operation in autograd's graph; to the weight it brings no gradient.

    The weight is an input all the same: where it alone learns, the output does, too,
    and the guard finds it in the graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        operation: WeightOperation,
        store: WeightGradients,
    ) -> torch.Tensor:
        # Detached: a later ``weight.data = ...`` does not change what is saved.
        used = weight.detach().to(dtype)
        ctx.save_for_backward(x, used)
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.store = operation, store
        ctx.weight = weight
        ctx.bias = bias if bias is not None and bias.requires_grad else None
        return operation.forward(x, used, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        nothing = (None,) * 5
        if grad is None:
            return None, *nothing
        if torch.is_grad_enabled():
            raise _differentiates_inside()
        x, used = ctx.saved_tensors
        operation = ctx.operation
        try:
            is_wanted = is_in_backward(ctx.next_functions[1][0])
        except RuntimeError:  # asked for by `torch.autograd.grad`
            raise _differentiates_inside() from None
        if is_wanted:
            kept = x.detach()  # without the graph behind it
            site = Site(operation, ctx.weight, ctx.bias, kept, version(kept), grad)
            ctx.owed = site.owed
            ctx.store.add(site)
        if not ctx.needs_input_grad[0]:
            return None, *nothing
        return operation.input_gradient(grad, x, used), *nothing


def _differentiates_inside() -> ConfigError:
    return ConfigError(
        "the stage differentiates in its own forward, or the loss function does, where "
        "the weights' gradients cannot be deferred; take a schedule that does not "
        "split backward (1f1b, gpipe), or PipelineConfig(split_backward=False)"
    )
