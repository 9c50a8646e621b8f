"""Muon for the hidden matrices of many replicas at once.

The arithmetic of `torch.optim.Muon` (momentum 0.95, Nesterov, five Newton-Schulz steps,
``adjust_lr_fn="match_rms_adamw"``, so that one learning rate serves AdamW beside it),
but batched over replicas, and in float32 where torch's iterates in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2
"""Root mean square of AdamW's usual update, which Muon's is scaled to."""


def orthogonal(matrices: Tensor) -> Tensor:
    """Newton-Schulz iterations of a batch of matrices, towards singular values of 1."""
    rows, columns = matrices.shape[-2:]
    found = matrices.transpose(1, 2) if rows > columns else matrices
    norms = torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True)
    found = found / norms.clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(found, found.transpose(1, 2))
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, update, found, beta=a)
    return found.transpose(1, 2) if rows > columns else found


@final
class MuonRows:
    """Steps the matrices in flat rows of parameters.

    Args:
        shapes: of a row's parameters.
        matrices: indices of those that Muon steps.
        weight_decay: decoupled, as AdamW's.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        matrices: Sequence[int],
        weight_decay: float,
    ) -> None:
        self.others: list[slice] = []
        self._by_shape: dict[tuple[int, ...], list[slice]] = {}
        self._weight_decay = weight_decay
        start = 0
        for index, shape in enumerate(shapes):
            stop = start + math.prod(shape)
            if index in matrices:
                self._by_shape.setdefault(shape, []).append(slice(start, stop))
            elif self.others and self.others[-1].stop == start:
                self.others[-1] = slice(self.others[-1].start, stop)
            else:
                self.others.append(slice(start, stop))
            start = stop

    def step(
        self,
        rows: Sequence[int],
        lr: float,
        theta: Tensor,
        grad: Tensor,
        momentum: Tensor,
    ) -> None:
        """One step of some rows; the tensors are (rows, parameters)."""
        for shape, parts in self._by_shape.items():
            for row in rows:
                for part in parts:
                    momentum[row, part].lerp_(grad[row, part], 1.0 - MOMENTUM)
            updates = torch.stack(
                [
                    grad[row, part].lerp(momentum[row, part], MOMENTUM).view(shape)
                    for row in rows
                    for part in parts
                ]
            )
            scale = lr * RMS * math.sqrt(max(shape))
            found = iter(orthogonal(updates))
            for row in rows:
                for part in parts:
                    held = theta[row, part]
                    held.mul_(1.0 - lr * self._weight_decay)
                    held.sub_(next(found).reshape(-1), alpha=scale)
