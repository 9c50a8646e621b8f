"""Ranks and independent runs of one model, stepped side by side.

A *column* is an independent run (a seed, a learning rate); all columns keep the same
schedule. The tensors are (ranks, columns, parameters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from benchmarks.convergence.tasks import Task

BETAS = (0.9, 0.99)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
MOMENTUM = 0.9
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Column:
    """One run among those that are trained together.

    Attributes:
        seed: of the initial parameters and the order of the samples.
        lr: highest learning rate.
    """

    seed: int
    lr: float


@final
class Replicas:
    """Parameters, optimizer state and buffers of all ranks and columns.

    Args:
        task: what is trained.
        columns: the runs.
        ranks: ranks of each.
        optimizer: ``"adamw"`` or ``"sgd"``.
    """

    def __init__(
        self, task: Task, columns: Sequence[Column], ranks: int, optimizer: str
    ) -> None:
        begun = [task.initial(column.seed) for column in columns]
        start = torch.stack([parameters for parameters, _ in begun])
        self.task = task
        self.columns = columns
        self.optimizer = optimizer
        self.theta = start.repeat(ranks, 1, 1)
        self.buffers = torch.stack([held for _, held in begun]).repeat(ranks, 1, 1)
        moments = 2 if optimizer == "adamw" else 1
        self.state = [torch.zeros_like(self.theta) for _ in range(moments)]
        self.grad = torch.zeros_like(self.theta)
        rows = ranks * len(columns)
        self._steps = [torch.zeros(()) for _ in range(rows)]
        self._leaves: dict[int, list[Tensor]] = {}

    def gradients(self, ranks: int, samples: Tensor) -> None:
        """Gradients of the first ranks, into ``grad``.

        Args:
            ranks: how many.
            samples: of shape (ranks, columns, samples).
        """
        rows = ranks * len(self.columns)
        if ranks not in self._leaves:
            flat = self.theta[:ranks].view(rows, -1)
            self._leaves[ranks] = [
                part.detach().requires_grad_() for part in self.task.views(flat)
            ]
        leaves = self._leaves[ranks]
        buffers = self.buffers[:ranks].view(rows, -1)
        loss = self.task.losses(leaves, buffers, samples.reshape(rows, -1))
        grads = torch.autograd.grad(loss, leaves)
        flat = self.grad[:ranks].view(rows, -1)
        for into, found in zip(self.task.views(flat), grads, strict=True):
            into.copy_(found)

    def clip(self, ranks: int) -> None:
        """Clips the gradients of the first ranks, each by itself."""
        flat = self.grad[:ranks].view(ranks * len(self.columns), -1)
        norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        flat.mul_((MAX_NORM / (norms + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def step(self, ranks: int, factor: float) -> None:
        """One step of the first ranks, with torch's own fused optimizers.

        Args:
            ranks: how many.
            factor: on the columns' learning rates.
        """
        count = len(self.columns)
        by_rate: dict[float, list[int]] = {}
        for row in range(ranks * count):
            by_rate.setdefault(self.columns[row % count].lr, []).append(row)
        for lr, rows in by_rate.items():
            self._fused(rows, lr * factor)

    def _fused(self, rows: Sequence[int], lr: float) -> None:
        """AdamW, or SGD with momentum."""

        def lines(tensor: Tensor) -> list[Tensor]:
            flat = tensor.view(len(self._steps), -1)
            return [flat[row] for row in rows]

        if self.optimizer == "sgd":
            torch._fused_sgd_(
                lines(self.theta),
                lines(self.grad),
                lines(self.state[0]),
                weight_decay=0.0,
                momentum=MOMENTUM,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
            return
        steps = [self._steps[row] for row in rows]
        torch._foreach_add_(steps, 1.0)
        torch._fused_adamw_(
            lines(self.theta),
            lines(self.grad),
            lines(self.state[0]),
            lines(self.state[1]),
            [],
            steps,
            lr=lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )

    def spread(self) -> None:
        """Gives all ranks what the first one holds."""
        for held in (self.theta, self.buffers, *self.state):
            held.copy_(held[:1].clone().expand_as(held))
        count = len(self.columns)
        for row, steps in enumerate(self._steps):
            steps.copy_(self._steps[row % count])

    def reset_state(self) -> None:
        """Forgets the optimizer's state of all ranks."""
        for held in (*self.state, *self._steps):
            held.zero_()
