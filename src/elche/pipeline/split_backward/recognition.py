"""Recognition of torch calls with a deferrable weight gradient.

A rule reads a call's arguments and returns the operation with its activation, weight
and bias; None where the call is not deferrable, and autograd does all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from elche.pipeline.split_backward.operations import (
    Convolution,
    Embedding,
    Linear,
    MatmulLeft,
    MatmulRight,
    WeightOperation,
)

LINEAR = Linear()
RIGHT = MatmulRight()
LEFT = MatmulLeft()


class Recognised(NamedTuple):
    """A call that is one of ours.

    Attributes:
        operation: which one.
        x: the activation.
        weight: as it stands in the call.
        bias: as it stands in the call.
    """

    operation: WeightOperation
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Recognised | None:
    if weight.dim() != 2:
        return None
    return Recognised(LINEAR, input, weight, bias)


class _Matmul:
    """A product of two; which of them is the weight is known by its type."""

    def __init__(self, is_weight: Callable[[Any], bool]) -> None:
        self._is_weight = is_weight

    def __call__(
        self, input: torch.Tensor, other: torch.Tensor | None = None, **options: Any
    ) -> Recognised | None:
        """``input @ other``."""
        if options or other is None or input.dim() < 2 or other.dim() < 2:
            return None
        if self._is_weight(other):
            return Recognised(RIGHT, input, other)
        return Recognised(LEFT, other, input)

    def reflected(self, input: torch.Tensor, other: torch.Tensor) -> Recognised | None:
        """``other @ input``."""
        return self(other, input)


def _addmm(
    input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **options: Any
) -> Recognised | None:
    if options or input.dim() != 1:
        return None
    return Recognised(RIGHT, mat1, mat2, input)


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Recognised | None:
    if max_norm is not None or sparse:
        return None
    row = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Recognised(Embedding(row, scale_grad_by_freq), input, weight)


def _convolution(space: int) -> Callable[..., Recognised | None]:
    def rule(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Recognised | None:
        if input.dim() != space + 2 or padding == "same":
            return None
        operation = Convolution(
            stride=_tuple(stride, space),
            padding=_tuple(0 if padding == "valid" else padding, space),
            dilation=_tuple(dilation, space),
            transposed=False,
            output_padding=(0,) * space,
            groups=groups,
        )
        return Recognised(operation, input, weight, bias)

    return rule


def _transposed(space: int) -> Callable[..., Recognised | None]:
    def rule(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Recognised | None:
        if input.dim() != space + 2:
            return None
        operation = Convolution(
            stride=_tuple(stride, space),
            padding=_tuple(padding, space),
            dilation=_tuple(dilation, space),
            transposed=True,
            output_padding=_tuple(output_padding, space),
            groups=groups,
        )
        return Recognised(operation, input, weight, bias)

    return rule


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * length
    made = tuple(value)
    return made * length if len(made) == 1 else made


def rules(is_weight: Callable[[Any], bool]) -> dict[Any, Any]:
    """Rules by torch function, for weights of a type."""
    matmul = _Matmul(is_weight)
    return {
        F.linear: _linear,
        F.embedding: _embedding,
        torch.addmm: _addmm,
        torch.mm: matmul,
        torch.bmm: matmul,
        torch.matmul: matmul,
        torch.Tensor.mm: matmul,
        torch.Tensor.bmm: matmul,
        torch.Tensor.matmul: matmul,
        torch.Tensor.__matmul__: matmul,
        torch.Tensor.__rmatmul__: matmul.reflected,
        F.conv1d: _convolution(1),
        F.conv2d: _convolution(2),
        F.conv3d: _convolution(3),
        F.conv_transpose1d: _transposed(1),
        F.conv_transpose2d: _transposed(2),
        F.conv_transpose3d: _transposed(3),
    }


VIEWS = frozenset(
    {
        torch.chunk,
        torch.flatten,
        torch.narrow,
        torch.permute,
        torch.reshape,
        torch.split,
        torch.squeeze,
        torch.t,
        torch.transpose,
        torch.unbind,
        torch.unflatten,
        torch.unsqueeze,
        torch.Tensor.T.__get__,  # type: ignore[attr-defined]
        torch.Tensor.__getitem__,
        torch.Tensor.chunk,
        torch.Tensor.flatten,
        torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
        torch.Tensor.narrow,
        torch.Tensor.permute,
        torch.Tensor.reshape,
        torch.Tensor.split,
        torch.Tensor.squeeze,
        torch.Tensor.t,
        torch.Tensor.to,
        torch.Tensor.transpose,
        torch.Tensor.unbind,
        torch.Tensor.unflatten,
        torch.Tensor.unsqueeze,
        torch.Tensor.view,
    }
)
"""Functions of one tensor after which a weight is still a weight."""
