"""Brings virtual ranks together, by the arithmetic of `elche.comm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from benchmarks.convergence.method import Method
from benchmarks.convergence.replicas import Replicas
from elche.comm.averaging.outer import OuterOptimizer, OuterStep
from elche.comm.codec.codec import CODECS, Codec, CodedMessage


@dataclass(slots=True)
class _Pending:
    """A synchronisation that is under way."""

    due: int
    parameters: Tensor
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
        self._outer = [OuterOptimizer(base) for base in self.base]
        self._rule = OuterStep(method.outer, method.outer_lr, method.outer_momentum)
        self._residual = torch.zeros_like(replicas.theta)
        self._sum_residual = torch.zeros_like(self.base)
        self._codec = CODECS[method.codec]
        self._pending: list[_Pending] = []

    def begin(self, due: int, counts: Tensor) -> None:
        """Takes a snapshot.

        Args:
            due: tick of its adoption.
            counts: batches of each rank since the last one.
        """
        self._pending.append(_Pending(due, self._held.theta.clone(), counts))

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
        mean = self._coded_sum(base - pending.parameters, weights)
        for column, outer in enumerate(self._outer):
            outer.step(0, mean[column].contiguous(), self._rule)
        held.theta += base - pending.parameters

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
