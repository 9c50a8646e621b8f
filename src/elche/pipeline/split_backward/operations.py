"""Operations of an activation with a weight whose weight gradient can come later.

Each is linear in the weight: the gradient of the weight needs the input and the
gradient of the output, and nothing else, so that it is computed whenever the schedule
wants it, straight into ``weight.grad``. Formulas are those of autograd's own nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from typing_extensions import override

_linear = F.linear  # torch's, whatever a script puts in its place


class WeightOperation(ABC):
    """A function of an activation and a weight, linear in each."""

    @abstractmethod
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The output."""

    @abstractmethod
    def input_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the activation, of its shape."""

    def kept(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The input as it is used and kept: itself, or its rows as a matrix.

        A matrix where torch would otherwise copy it once more for the weight gradient.
        """
        return x

    def rows(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output gradient and input in the shape that the gradients below take."""
        return grad, x

    @abstractmethod
    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        """The gradient of the weight, of this shape; see :meth:`rows`."""

    def add_weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Adds the gradient of the weight to a tensor; see :meth:`rows`."""
        into.add_(self.weight_gradient(grad, x, into.shape))

    def bias_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of a bias along the output's last dimension."""
        return _matrix(grad).sum(0)

    @abstractmethod
    def flops(self, grad: torch.Tensor, weight: torch.Tensor) -> int:
        """Floating point operations of the weight gradient."""


@final
class Linear(WeightOperation):
    """``F.linear``: x [..., in], weight [out, in]."""

    @override
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return _linear(x, weight, bias)

    @override
    def input_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return _matrix(grad).mm(weight).view(x.shape)

    @override
    def kept(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # torch takes a product per sample where the weight needs no gradient.
        return x if x.is_contiguous() else _matrix(x)

    @override
    def rows(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _matrix(grad), _matrix(x)

    @override
    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        return grad.t().mm(x)

    def add_weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, into: torch.Tensor
    ) -> None:
        """One product that adds to what is there."""
        into.addmm_(grad.t(), x)

    @override
    def flops(self, grad: torch.Tensor, weight: torch.Tensor) -> int:
        return 2 * grad.numel() * weight.size(1)


@final
class MatmulRight(WeightOperation):
    """``x @ weight + bias``, broadcast: x [..., n, in], weight [..., in, out]."""

    @override
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if bias is not None:
            return torch.addmm(bias, x, weight)
        return torch.matmul(x, weight)

    @override
    def input_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return torch.matmul(grad, weight.mT).sum_to_size(x.shape)

    @override
    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        if len(shape) == 2:
            return x.t().mm(grad)
        return torch.matmul(x.mT, grad).sum_to_size(shape)

    @override
    def kept(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _matrix(x) if weight.dim() == 2 and not x.is_contiguous() else x

    @override
    def rows(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (_matrix(grad), _matrix(x)) if weight.dim() == 2 else (grad, x)

    def add_weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, into: torch.Tensor
    ) -> None:
        """One product that adds to what is there, for a matrix."""
        if into.dim() == 2:
            into.addmm_(x.t(), grad)
        else:
            super().add_weight_gradient(grad, x, into)

    @override
    def flops(self, grad: torch.Tensor, weight: torch.Tensor) -> int:
        return 2 * grad.numel() * weight.shape[-2]


@final
class MatmulLeft(WeightOperation):
    """``weight @ x``, batches broadcast: weight [..., out, in], x [..., in, n]."""

    @override
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.matmul(weight, x)

    @override
    def input_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return torch.matmul(weight.mT, grad).sum_to_size(x.shape)

    @override
    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        return torch.matmul(grad, x.mT).sum_to_size(shape)

    @override
    def flops(self, grad: torch.Tensor, weight: torch.Tensor) -> int:
        return 2 * grad.numel() * weight.shape[-1]


@final
@dataclass(frozen=True)
class Embedding(WeightOperation):
    """``F.embedding``, dense: x holds indices, weight [rows, width].

    Attributes:
        padding_idx: the row that gets no gradient; -1 for none.
        scale_grad_by_freq: divide by how often a row occurs.
    """

    padding_idx: int
    scale_grad_by_freq: bool

    @override
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.embedding(weight, x, self.padding_idx, self.scale_grad_by_freq)

    def input_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Indices have none; never called."""
        raise TypeError("an index has no gradient")

    @override
    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.embedding_dense_backward(
            grad, x, shape[0], self.padding_idx, self.scale_grad_by_freq
        )
        return made

    @override
    def flops(self, grad: torch.Tensor, weight: torch.Tensor) -> int:
        return grad.numel()


@final
@dataclass(frozen=True)
class Convolution(WeightOperation):
    """``F.conv*`` and ``F.conv_transpose*`` on batched input [N, channels, *space].

    Attributes:
        stride: per dimension of space, as all below.
        padding: zeros added on both sides.
        dilation: distance of the kernel's points.
        transposed: whether it is a transposed convolution.
        output_padding: of a transposed one.
        groups: of channels.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @override
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.convolution(x, weight, bias, *self._settings())

    @override
    def input_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return self._backward(grad, x, weight, [True, False, False])[0]

    @override
    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        # Only its shape is read; zero strides keep it from taking memory.
        stand_in = grad.new_zeros(1).expand(shape)
        return self._backward(grad, x, stand_in, [False, True, False])[1]

    def bias_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of a bias along the channels."""
        return grad.sum([0, *range(2, grad.dim())])

    @override
    def flops(self, grad: torch.Tensor, weight: torch.Tensor) -> int:
        return 2 * grad.numel() * (weight.numel() // weight.shape[0])

    def _settings(self) -> tuple[Any, ...]:
        return (
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def _backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        wanted: list[bool],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            torch.ops.aten.convolution_backward(
                grad, x, weight, None, *self._settings(), wanted
            )
        )
        return made


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """All leading dimensions as one."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
