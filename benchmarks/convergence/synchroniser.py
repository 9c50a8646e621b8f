"""Brings virtual ranks together, by the arithmetic of `elche.comm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from benchmarks.convergence.method import Method
from benchmarks.convergence.replicas import Replicas
from elche.comm.averaging.outer import OuterOptimizer, OuterStep
from elche.comm.codec.codec import Codec, codec_named


@dataclass(slots=True)
class _Pending:
    """A synchronisation that is under way."""

    due: int
    parameters: Tensor
    state: list[Tensor]
    buffers: Tensor
    counts: Tensor
    shift: Tensor


def largest(values: Tensor, part: float) -> Tensor:
    """The largest elements of every row, by magnitude; the others are zero."""
    keep = max(1, round(part * values.shape[-1]))
    least = values.abs().topk(keep, dim=-1).values[..., -1:]
    return torch.where(values.abs() >= least, values, 0.0)


def decoded(codec: Codec, values: Tensor) -> Tensor:
    """What remains of every row after encoding and decoding."""
    size = values.shape[-1]
    memory = torch.zeros(codec.encoded_bytes(size), dtype=torch.uint8)
    out = torch.empty_like(values)
    rows = values.reshape(-1, size)
    for row, into in zip(rows, out.view(-1, size), strict=True):
        message = codec.over(memory, size)
        message.write(0, row)
        message.read(0, into)
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
        self._slow = torch.zeros_like(self.base)
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
        held = self._held
        late = self._method.state == "late"
        snapshot = held.theta.clone()
        shift = torch.zeros_like(self.base)
        if self._method.anticipate:
            method = self._method
            momentum = method.outer_lr * method.outer_momentum**2
            shift.sub_(self._slow, alpha=momentum)
            held.theta += shift
        self._pending.append(
            _Pending(
                due,
                snapshot,
                [moment.clone() for moment in held.state] if late else [],
                held.buffers.clone(),
                counts,
                shift,
            )
        )

    def adopt(self, tick: int, progress: float) -> None:
        """Adopts what is due by now.

        Args:
            tick: now.
            progress: samples trained on over samples of the run.
        """
        for pending in [p for p in self._pending if p.due <= tick]:
            self._pending.remove(pending)
            self._adopt(pending, progress)

    def _adopt(self, pending: _Pending, progress: float) -> None:
        method, held = self._method, self._held
        weights = self._weights(pending.counts)[:, None, None]
        base = self.base
        drifts = base - pending.parameters
        sent = drifts if method.top == 1.0 else largest(drifts, method.top)
        mean = self._coded_sum(sent, weights)
        remainder = (drifts - mean).mul_(1.0 - method.mix) if method.mix < 1.0 else None
        before = base.clone()
        for column, outer in enumerate(self._outer):
            self._outer_step(column, outer, mean[column], progress)
        if method.top < 1.0:
            held.theta += base - before + sent
        else:
            correction = base - pending.parameters
            if remainder is not None:
                correction -= remainder
            correction -= pending.shift
            held.theta += correction
        self._share_state(pending, weights)
        if held.buffers.shape[-1]:
            held.buffers.copy_(
                (pending.buffers * weights).sum(0).expand_as(held.buffers)
            )

    def _share_state(self, pending: _Pending, weights: Tensor) -> None:
        held = self._held
        if self._method.state in ("average", "second"):
            shared = held.state[1:] if self._method.state == "second" else held.state
            for moment in shared:
                moment.copy_((moment * weights).sum(0).expand_as(moment))
        elif self._method.state == "late":
            for moment, then in zip(held.state, pending.state, strict=True):
                moment += (then * weights).sum(0) - then
            if len(held.state) == 2:  # a second moment is never negative
                held.state[1].clamp_(min=0.0)
        elif self._method.state == "reset":
            held.reset_state()

    def _weights(self, counts: Tensor) -> Tensor:
        """Normalised weights of the ranks' drifts.

        A rank that did nothing has none, unless it holds a remainder of its own.
        """
        whole = self._method.mix == 1.0
        raw = {
            "equal": (counts > 0).float() if whole else torch.ones_like(counts),
            "samples": counts,
            "sqrt": counts.sqrt(),
        }[self._method.weights]
        return raw / raw.sum()

    def _coded_sum(self, sent: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean of what arrives: coded twice, with what was lost added back."""
        if self._method.codec == "fp32":
            return (sent * weights).sum(0)
        residual, total = self._residual, self._sum_residual
        message = sent + residual
        arrived = decoded(self._codec, message)
        residual.copy_(message - arrived)
        mean = (arrived * weights).sum(0)
        if len(sent) == 2:  # two ranks swap whole messages: nothing is coded again
            return mean
        again = mean + total
        arrived = decoded(self._codec, again)
        total.copy_(again - arrived)
        return arrived

    def _outer_step(
        self,
        column: int,
        outer: OuterOptimizer,
        mean: Tensor,
        progress: float,
    ) -> None:
        """Nesterov and averaging are the library's; SlowMo is arXiv:1910.00643."""
        method = self._method
        if method.outer == "slowmo":
            lr = max(
                method.rate_at(progress), 1e-3
            )  # of the inner step; its scale cancels
            slow = self._slow[column]
            slow.mul_(method.outer_momentum).add_(mean, alpha=1.0 / lr)
            self.base[column].sub_(slow, alpha=method.outer_lr * lr)
            return
        if method.anticipate:
            slow = self._slow[column]
            slow.mul_(method.outer_momentum).add_(mean)
            mean = mean.add(slow, alpha=method.outer_momentum)
            self.base[column].sub_(mean, alpha=method.outer_lr)
            return
        momentum = method.momentum_at(progress)
        rule = OuterStep(method.outer, method.outer_lr, momentum)
        outer.step(0, mean.contiguous(), rule)
