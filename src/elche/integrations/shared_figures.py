"""Values shared besides gradients: rank 0's evaluation, and mean losses for logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, final

import torch

from elche.comm.transport.process_group import Group

TICK_S = 20.0
"""Interval (s) of rank 0's messages to waiting ranks while it evaluates."""
_END = "the end of rank 0's evaluation"
MOST_STEPS = 256
"""Most steps whose losses are kept before they are reduced."""


@final
class MainEvaluation:
    """Evaluates on rank 0 and sends the result to the waiting ranks.

    Args:
        group: process group of the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ticked_s: float | None = None

    def run(self, evaluate: Callable[[], Any]) -> Any:
        """Evaluates on rank 0; returns the result on all ranks, on others via JSON."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        text = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._group.rank == 0:
            self._ticked_s = time.monotonic()
            try:
                raw = json.dumps(evaluate(), default=float).encode()
            finally:
                self._ticked_s = None
            text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            self._group.broadcast(length.fill_(len(raw)), _END)
        while not length:
            self._group.broadcast(length, _END)
        if self._group.rank != 0:
            text = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        self._group.broadcast(text, "the metrics of rank 0's evaluation")
        return json.loads(text.numpy().tobytes())

    def tick(self) -> None:
        """Notifies waiting ranks after a batch of rank 0's evaluation; else no-op."""
        now_s = time.monotonic()
        every_s = min(TICK_S, self._group.timeout_s / 4)
        if self._ticked_s is not None and now_s - self._ticked_s > every_s:
            self._ticked_s = now_s
            self._group.broadcast(torch.zeros(1, dtype=torch.int64, device="cpu"), _END)


@final
class StepLosses:
    """Sums the mean losses of steps, weighted over ranks like the gradients.

    Every rank makes the same calls.

    Args:
        group: process group of the ranks.
        hides_non_finite: replace a step's NaN or Inf by the mean of the finite steps.
    """

    def __init__(self, group: Group, *, hides_non_finite: bool) -> None:
        self._group = group
        self._hides_non_finite = hides_non_finite
        self._losses: list[torch.Tensor] = []
        self._weights: list[float] = []
        self._sum = 0.0

    def begin_step(self, weight: float) -> None:
        """Begins a step in which this rank's part has this weight."""
        if len(self._losses) >= MOST_STEPS:
            self._reduce()
        self._weights.append(weight)
        self._losses.append(torch.zeros((), device="cpu"))

    def add(self, loss: torch.Tensor) -> None:
        """Adds a micro-batch's part of this rank's mean loss, without a device sync."""
        self._losses[-1] = self._losses[-1].to(loss.device) + loss

    def take(self) -> float:
        """Returns the sum over the steps since the last call."""
        self._reduce()
        total, self._sum = self._sum, 0.0
        return total

    def _reduce(self) -> None:
        if not self._losses:
            return
        losses = torch.stack([each.to("cpu", torch.float64) for each in self._losses])
        weights = torch.tensor(self._weights, dtype=torch.float64, device="cpu")
        self._losses, self._weights = [], []
        sums = torch.stack((torch.where(weights > 0, losses * weights, 0.0), weights))
        self._group.all_reduce(sums, "averaging losses")
        means = sums[0] / sums[1]
        if self._hides_non_finite:
            finite = means[means.isfinite()]
            rest = float(finite.mean()) if len(finite) else 0.0
            means = torch.where(means.isfinite(), means, rest)
        self._sum += float(means.sum())
