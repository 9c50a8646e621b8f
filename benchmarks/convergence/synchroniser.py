"""Brings virtual ranks together, by the arithmetic of `elche.comm`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from benchmarks.convergence.method import Method
from benchmarks.convergence.replicas import Replicas
from elche.comm.averaging.outer import OuterOptimizer, OuterStep
from elche.comm.codec.codec import Codec, CodedMessage, codec_named

ALIGNED = 0.5
"""HeLoCo keeps drifts of at least this cosine to the momentum. The paper's constants
are not public in text; κ and both strengths are 1 here."""


@dataclass(slots=True)
class _Pending:
    """A synchronisation that is under way; ranks continue from ``resumed``."""

    due: int
    parameters: Tensor
    resumed: Tensor
    counts: Tensor


def decoded(codec: Codec, values: Tensor) -> Tensor:
    """What remains of every row after encoding and decoding."""
    size = values.shape[-1]
    message, every = CodedMessage(codec, range(size)), range(size)
    out = torch.empty_like(values)
    rows = values.reshape(-1, size)
    for row, into in zip(rows, out.view(-1, size), strict=True):
        message.write(every, row)
        message.read(every, into)
    return out


def toward(drift: Tensor, momentum: Tensor) -> Tensor:
    """One tensor's drifts, corrected by HeLoCo; the last dimension is flat.

    What opposes the momentum is shrunk along it; what is nearly orthogonal is turned
    toward it and keeps its norm.
    """
    norm = torch.linalg.vector_norm(drift, dim=-1, keepdim=True)
    size = torch.linalg.vector_norm(momentum, dim=-1, keepdim=True)
    unit, reference = drift / (norm + 1e-12), momentum / (size + 1e-12)
    cosine = (unit * reference).sum(-1, keepdim=True)
    confidence = norm / (norm + size + 1e-12)
    shrunk = drift - (-cosine * confidence).clamp(max=1.0) * cosine * norm * reference
    part = (ALIGNED - cosine).clamp(min=0.0) * confidence
    turned = torch.lerp(unit, reference.expand_as(unit), part)
    turned *= norm / (torch.linalg.vector_norm(turned, dim=-1, keepdim=True) + 1e-12)
    return torch.where(cosine < 0.0, shrunk, turned)


@final
class Synchroniser:
    """Brings the ranks' parameters together, as `elche.comm` does.

    Args:
        replicas: the ranks.
        method: how.
    """

    def __init__(self, replicas: Replicas, method: Method) -> None:
        self._held = replicas
        self._method = method
        self.base = replicas.theta[0].clone()
        self._moved = torch.zeros_like(self.base)
        self._outer = [OuterOptimizer(base) for base in self.base]
        self._rule = OuterStep(method.outer, method.outer_lr, method.outer_momentum)
        self._residual = torch.zeros_like(replicas.theta)
        self._sum_residual = torch.zeros_like(self.base)
        self._codec = codec_named(method.codec)
        self._pending: list[_Pending] = []

    def begin(self, due: int, counts: Tensor) -> None:
        """Takes a snapshot.

        Args:
            due: tick of its adoption.
            counts: batches of each rank since the last one.
        """
        taken = resumed = self._held.theta.clone()
        if self._method.correction in ("extrapolated", "eager"):
            self._held.theta.copy_(self._predicted(taken))
            resumed = self._held.theta.clone()
        self._pending.append(_Pending(due, taken, resumed, counts))

    def _predicted(self, taken: Tensor) -> Tensor:
        """What each rank expects the next common parameters to be."""
        if self._method.correction == "extrapolated":
            return (self.base + self._moved).expand_as(taken)
        found = []
        for own in taken:
            base, drift = self.base.clone(), self.base - own
            for column, held in enumerate(self._outer):
                outer = OuterOptimizer(base[column])
                outer.load_momentum(held.momentum)
                outer.step(0, drift[column].contiguous(), self._rule)
            found.append(base)
        return torch.stack(found)

    def _corrected(self, drift: Tensor) -> Tensor:
        """Drifts of all ranks, toward the outer momentum if the method says so."""
        momenta = [outer.momentum for outer in self._outer]
        if self._method.correction != "heloco" or momenta[0] is None:
            return drift
        momentum = torch.stack([m.float() for m in momenta if m is not None])
        sizes = [math.prod(shape) for shape in self._held.task.shapes]
        parts = zip(drift.split(sizes, -1), momentum.split(sizes, -1), strict=True)
        return torch.cat([toward(*each) for each in parts], dim=-1)

    def adopt(self, tick: int) -> None:
        """Adopts what is due by now."""
        for pending in [p for p in self._pending if p.due <= tick]:
            self._pending.remove(pending)
            self._adopt(pending)

    def _adopt(self, pending: _Pending) -> None:
        """Ranks that trained weigh the same; one that did nothing has no weight."""
        held, base = self._held, self.base
        raw = (pending.counts > 0).float()
        weights = (raw / raw.sum())[:, None, None]
        drift = self._corrected(base - pending.parameters)
        mean, before = self._coded_sum(drift, weights), base.clone()
        for column, outer in enumerate(self._outer):
            outer.step(0, mean[column].contiguous(), self._rule)
        self._moved = base - before
        held.theta += base - pending.resumed

    def _coded_sum(self, sent: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean of what arrives: coded twice, with what was lost added back."""
        if self._method.codec == "fp32":
            return (sent * weights).sum(0)
        residual, total = self._residual, self._sum_residual
        message = sent + residual
        arrived = decoded(self._codec, message)
        residual.copy_(message - arrived)
        mean = (arrived * weights).sum(0)
        again = mean + total
        arrived = decoded(self._codec, again)
        total.copy_(again - arrived)
        return arrived
