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

from benchmarks.convergence.muon import MuonRows
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
    """Parameters and optimizer state of all ranks and columns.

    Args:
        task: what is trained.
        columns: the runs.
        ranks: ranks of each.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"muon"``.
    """

    def __init__(
        self, task: Task, columns: Sequence[Column], ranks: int, optimizer: str
    ) -> None:
        start = torch.stack([task.initial(column.seed) for column in columns])
        self.task = task
        self.columns = columns
        self.optimizer = optimizer
        self.theta = start.repeat(ranks, 1, 1)
        moments = 1 if optimizer == "sgd" else 2
        self.state = [torch.zeros_like(self.theta) for _ in range(moments)]
        self.grad = torch.zeros_like(self.theta)
        rows = ranks * len(columns)
        self._steps = [torch.zeros(()) for _ in range(rows)]
        self._leaves: dict[int, list[Tensor]] = {}
        self._muon = MuonRows(task.shapes, task.matrices, WEIGHT_DECAY)

    def gradients(self, ranks: Sequence[int], samples: Tensor) -> None:
        """Gradients of some ranks, into ``grad``.

        Args:
            ranks: which, in ascending order.
            samples: of shape (ranks, columns, samples).
        """
        rows = len(ranks) * len(self.columns)
        leaves, is_first = self._leaves_of(ranks, rows)
        loss = self.task.losses(leaves, samples.reshape(rows, -1))
        grads = torch.autograd.grad(loss, leaves)
        if is_first:
            into = self.task.views(self.grad[: len(ranks)].view(rows, -1))
            for part, found in zip(into, grads, strict=True):
                part.copy_(found)
            return
        found = torch.cat([grad.view(rows, -1) for grad in grads], dim=1)
        self.grad[ranks] = found.view(len(ranks), len(self.columns), -1)

    def _leaves_of(self, ranks: Sequence[int], rows: int) -> tuple[list[Tensor], bool]:
        """Parameters by tensor, and whether they are views of the first ranks'."""
        count = len(ranks)
        is_first = ranks[-1] == count - 1
        if is_first and count in self._leaves:
            return self._leaves[count], True
        held = self.theta[:count] if is_first else self.theta[ranks]
        parts = self.task.views(held.view(rows, -1))
        leaves = [part.detach().requires_grad_() for part in parts]
        if is_first:
            self._leaves[count] = leaves
        return leaves, is_first

    def clip(self, ranks: Sequence[int]) -> None:
        """Clips the gradients of some ranks, each by itself."""
        for rank in ranks:
            flat = self.grad[rank]
            norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
            flat.mul_((MAX_NORM / (norms + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def step(self, ranks: Sequence[int], factor: float) -> None:
        """One step of some ranks, with torch's own fused optimizers.

        Args:
            ranks: which.
            factor: on the columns' learning rates.
        """
        count = len(self.columns)
        by_rate: dict[float, list[int]] = {}
        for rank in ranks:
            for column, each in enumerate(self.columns):
                by_rate.setdefault(each.lr, []).append(rank * count + column)
        for lr, rows in by_rate.items():
            self._step_rows(rows, lr * factor)

    def _step_rows(self, rows: Sequence[int], lr: float) -> None:
        """One step of some rows at one learning rate."""

        def lines(tensor: Tensor, parts: Sequence[slice]) -> list[Tensor]:
            flat = tensor.view(len(self._steps), -1)
            return [flat[row, part] for row in rows for part in parts]

        whole = [slice(None)]
        if self.optimizer == "sgd":
            torch._fused_sgd_(
                lines(self.theta, whole),
                lines(self.grad, whole),
                lines(self.state[0], whole),
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
        parts = whole
        if self.optimizer == "muon":
            parts = self._muon.others
            held = [t.view(len(self._steps), -1) for t in (self.theta, self.grad)]
            momentum = self.state[0].view(len(self._steps), -1)
            self._muon.step(rows, lr, *held, momentum)
        torch._fused_adamw_(
            lines(self.theta, parts),
            lines(self.grad, parts),
            lines(self.state[0], parts),
            lines(self.state[1], parts),
            [],
            [each for each in steps for _ in parts],
            lr=lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )
