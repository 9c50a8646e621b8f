"""Operations of an activation with a weight whose weight gradient can be deferred.

Each is linear in the weight: its gradient only needs the input and the gradient of the
output. The formulas are those of autograd's own nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch


@final
@dataclass(frozen=True)
class WeightOperation:
    """A function of an activation and a weight, linear in each.

    Attributes:
        forward: function of the activation, the weight, and the bias or None.
        input_gradient: function of the output's gradient, the activation and the
            weight.
        weight_gradient: function of the output's gradient, the activation and the
            weight's shape; may return two matrices instead of their product.
        bias_gradient: function of the output's gradient.
        takes_rows: whether activation and output are matrices, with dimensions
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
    """`F.embedding`, dense: x holds indices, weight [rows, width]."""
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
        # Only its shape is read; zero strides avoid an allocation.
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
