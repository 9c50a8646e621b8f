"""Deferred weight gradients of a stage.

:func:`defer` runs an operation as one autograd node. The node's backward computes the
gradient of the activation, and keeps the inputs of the weight's gradient. The idea is
that of zero-bubble pipelines (Qi et al., ICLR 2024). One fused product adds a weight
gradient to ``weight.grad``; autograd would compute the product first and add it
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch.autograd import forward_ad

from elche.errors import ConfigError
from elche.torch_internals.held import version
from elche.torch_internals.passes import function_modes, in_functorch, is_in_backward

_Views: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Views of parameters with their gradients."""


@final
@dataclass(frozen=True)
class WeightOperation:
    """Function of an activation and a weight, linear in each.

    The weight's gradient only needs the input and the gradient of the output. The
    formulas are the same as in autograd's own nodes.

    Attributes:
        forward: function of the activation, the weight, and the bias or None.
        input_gradient: function of the output's gradient, the activation and the
            weight.
        weight_gradient: function of the output's gradient, the activation and the
            weight's shape; may return two matrices instead of their product.
        bias_gradient: function of the output's gradient.
        takes_rows: whether activation and output are matrices: leading dimensions are
            flattened.
    """

    forward: Callable[..., torch.Tensor]
    input_gradient: Callable[..., torch.Tensor]
    weight_gradient: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    bias_gradient: Callable[[torch.Tensor], torch.Tensor]
    takes_rows: bool = False


LINEAR = WeightOperation(
    forward=lambda x, weight, bias: (
        x.mm(weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    ),
    input_gradient=lambda grad, x, weight: grad.mm(weight),
    weight_gradient=lambda grad, x, shape: (grad.t(), x),
    bias_gradient=lambda grad: grad.sum(0),
    takes_rows=True,
)
"""`F.linear`: x [rows, in], weight [out, in]."""

TRANSPOSED_LINEAR = WeightOperation(
    forward=lambda x, weight, bias: torch.addmm(bias, x, weight),
    input_gradient=lambda grad, x, weight: grad.mm(weight.t()),
    weight_gradient=lambda grad, x, shape: (x.t(), grad),
    bias_gradient=lambda grad: grad.sum(0),
    takes_rows=True,
)
"""`torch.addmm`: x [rows, in], weight [in, out]."""


@cache
def embedding(padding_idx: int | None, scale_grad_by_freq: bool) -> WeightOperation:
    """`F.embedding` with dense gradients: x has indices, weight is [rows, width]."""
    row = -1 if padding_idx is None else padding_idx
    return WeightOperation(
        forward=lambda x, weight, bias: torch.embedding(
            weight, x, row, scale_grad_by_freq
        ),
        input_gradient=_none,
        weight_gradient=lambda grad, x, shape: torch.ops.aten.embedding_dense_backward(
            grad, x, shape[0], row, scale_grad_by_freq
        ),
        bias_gradient=_none,
    )


@cache
def convolution(*settings: Any) -> WeightOperation:
    """`torch.convolution` on batched input [N, channels, *space].

    Args:
        *settings: stride, padding, dilation, transposed, output padding and groups.
    """

    def weight_gradient(
        grad: torch.Tensor, x: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        # Only the weight's shape is read; zero strides avoid an allocation.
        weight = grad.new_zeros(1).expand(shape)
        wanted = (False, True, False)
        made: torch.Tensor = gradients(grad, x, weight, None, *settings, wanted)[1]
        return made

    gradients: Any = torch.ops.aten.convolution_backward
    return WeightOperation(
        forward=lambda x, weight, bias: torch.convolution(x, weight, bias, *settings),
        input_gradient=lambda grad, x, weight: gradients(
            grad, x, weight, None, *settings, (True, False, False)
        )[0],
        weight_gradient=weight_gradient,
        bias_gradient=lambda grad: grad.sum([0, *range(2, grad.dim())]),
    )


def _none(*_: Any) -> torch.Tensor:
    raise TypeError("an index has no gradient, an embedding no bias")


class Site(NamedTuple):
    """One use of a weight, with all inputs of the weight's gradient.

    Attributes:
        operation: the operation.
        weight: the parameter, or a view of it.
        bias: the bias or a view of it; None if there is no trainable bias.
        x: the input.
        version: version of the input's memory when the output's gradient arrived.
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
        """Tensors whose gradients are not yet computed."""
        return [one for one in (self.weight, self.bias) if one is not None]


@final
class WeightGradients:
    """Store of a stage's deferred weight gradients.

    Attributes:
        computed: number of deferred weight gradients so far.
    """

    def __init__(self) -> None:
        self.computed = 0
        self._open: list[Site] | None = None
        self._waiting: dict[int, list[Site]] = {}

    def open(self, microbatch: int) -> None:
        """Starts to record deferred weight gradients of a microbatch."""
        self._open = self._waiting.setdefault(microbatch, [])

    def close(self) -> None:
        """Stops recording; also called after an error."""
        self._open = None

    def add(self, site: Site) -> None:
        """Records a deferred weight gradient."""
        if self._open is None:
            raise _differentiates_inside()
        self._open.append(site)

    def waiting_for(self, microbatch: int) -> list[torch.Tensor]:
        """Weights and biases whose gradient of a microbatch is still deferred."""
        return [one for site in self._waiting.get(microbatch, ()) for one in site.owed]

    def compute(self, microbatch: int) -> None:
        """Adds a microbatch's deferred gradients to the parameters' ``grad``.

        Starts with the forward's first operation: its output gradient was computed last
        and may still be in the cache. Drops each site as soon as it is done.
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
        """Drops all deferred gradients."""
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
            into.addmm_(*value)  # fused multiply and add
        else:
            _accumulate(weight, torch.mm(*value), views)
        if site.bias is not None:
            _accumulate(site.bias, operation.bias_gradient(grad), views)


def _accumulate(target: torch.Tensor, value: torch.Tensor, views: _Views) -> None:
    # A bias may be broadcast from one element.
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
    """Runs an operation and defers its weight gradient to a store.

    `weight` is a trainable parameter, or a view of one; `x` may hold indices.

    Returns:
        The output; None if the operation must run under plain autograd.
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
            return None  # torch's own error is clearer
    is_flat = not operation.takes_rows or x.dim() == 2
    rows = x if is_flat else x.reshape(-1, x.shape[-1])
    made: torch.Tensor = _Deferred.apply(  # type: ignore[no-untyped-call, unused-ignore]
        rows, weight, bias, used, operation, store
    )
    # Not inside the function, where autograd forbids in-place changes of views.
    return made if is_flat else made.view(*x.shape[:-1], made.shape[-1])


def _has_device_alone() -> bool:
    """True if the only function mode is the default device, which is harmless here."""
    return function_modes() == 1 and torch.get_default_device().type != "cpu"


class _Deferred(torch.autograd.Function):
    """Operation in autograd's graph that returns no gradient for its weight.

    The weight is an input nevertheless. The output then requires a gradient even if
    only the weight does, and the guard finds the weight in the graph.
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
        # Detached: a later ``weight.data = ...`` does not change the saved tensor.
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
        except RuntimeError:  # called by `torch.autograd.grad`
            raise _differentiates_inside() from None
        if is_wanted:
            kept = x.detach()  # releases the graph behind it
            site = Site(operation, ctx.weight, ctx.bias, kept, version(kept), grad)
            ctx.owed = site.owed
            ctx.store.add(site)
        if not ctx.needs_input_grad[0]:
            return None, *nothing
        return operation.input_gradient(grad, x, used), *nothing


def _differentiates_inside() -> ConfigError:
    return ConfigError(
        "the stage differentiates in its own forward, or the loss function does, "
        "where the weights' gradients cannot be deferred; use a schedule that does "
        "not split backward (1f1b, gpipe), or PipelineConfig(split_backward=False)"
    )
