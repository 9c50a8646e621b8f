"""Trains virtual ranks in one process, by the arithmetic of `elche.comm`.

Time is counted in *ticks*, batches of the fastest rank. A rank of half the speed ends a
batch at every second tick. Ranks are kept fastest first, so those that end a batch at a
tick are the first so many rows of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from benchmarks.convergence.method import Method
from benchmarks.convergence.replicas import Column, Replicas
from benchmarks.convergence.tasks import Task
from elche.comm.codec import codec_named
from elche.comm.outer import OuterOptimizer, OuterStep

WARM_UP = 0.05
EARLY = 0.2


@dataclass(slots=True)
class _Pending:
    """A fragment's synchronisation that is under way."""

    due: int
    part: slice
    parameters: Tensor
    state: list[Tensor]
    buffers: Tensor
    counts: Tensor
    shift: Tensor


def rate(progress: float) -> float:
    """Factor on the learning rate: linear warm-up of 5 %, then half a cosine to zero.

    Args:
        progress: samples trained on over samples of the run.
    """
    if progress < WARM_UP:
        return progress / WARM_UP
    along = (progress - WARM_UP) / (1.0 - WARM_UP)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, along)))


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

    def begin(self, part: slice, due: int, counts: Tensor) -> None:
        """Takes a snapshot of one fragment.

        Args:
            part: which elements.
            due: tick of its adoption.
            counts: batches of each rank since this fragment's last snapshot.
        """
        held = self._held
        late = self._method.state == "late"
        snapshot = held.theta[:, :, part].clone()
        shift = torch.zeros_like(self.base[:, part])
        if self._method.anticipate:
            method = self._method
            momentum = method.outer_lr * method.outer_momentum**2
            shift.sub_(self._slow[:, part], alpha=momentum)
            held.theta[:, :, part] += shift
        self._pending.append(
            _Pending(
                due,
                part,
                snapshot,
                [moment[:, :, part].clone() for moment in held.state] if late else [],
                held.buffers.clone(),
                counts.clone(),
                shift,
            )
        )

    def adopt(self, tick: int, factor: float) -> None:
        """Adopts what is due by now.

        Args:
            tick: now.
            factor: on the learning rate, for SlowMo.
        """
        for pending in [p for p in self._pending if p.due <= tick]:
            self._pending.remove(pending)
            self._adopt(pending, factor)

    def _adopt(self, pending: _Pending, factor: float) -> None:
        method, held, part = self._method, self._held, pending.part
        weights = self._weights(pending.counts)[:, None, None]
        base = self.base[:, part]
        drifts = base - pending.parameters
        sent = self._sent(drifts, part)
        mean = self._coded_sum(sent, weights, part)
        before = base.clone()
        for column, outer in enumerate(self._outer):
            self._outer_step(column, outer, part, mean[column], factor)
        if method.top < 1.0:
            held.theta[:, :, part] += base - before + sent
        else:
            correction = (base - pending.parameters).mul_(method.mix)
            correction -= pending.shift
            held.theta[:, :, part] += correction
        self._share_state(pending, weights)
        if held.buffers.shape[-1]:
            held.buffers.copy_(
                (pending.buffers * weights).sum(0).expand_as(held.buffers)
            )

    def _share_state(self, pending: _Pending, weights: Tensor) -> None:
        held, part = self._held, pending.part
        if self._method.state == "average":
            for moment in held.state:
                now = moment[:, :, part]
                now.copy_((now * weights).sum(0).expand_as(now))
        elif self._method.state == "late":
            for moment, then in zip(held.state, pending.state, strict=True):
                moment[:, :, part] += (then * weights).sum(0) - then
            if len(held.state) == 2:  # a second moment is never negative
                held.state[1][:, :, part].clamp_(min=0.0)
        elif self._method.state == "reset":
            held.reset_state()

    def _weights(self, counts: Tensor) -> Tensor:
        """Normalised weights of the ranks' drifts; a rank that did nothing has none."""
        raw = {
            "equal": (counts > 0).float(),
            "samples": counts,
            "sqrt": counts.sqrt(),
        }[self._method.weights]
        return raw / raw.sum()

    def _sent(self, drifts: Tensor, part: slice) -> Tensor:
        """What the ranks send: all, or the largest elements."""
        method = self._method
        if method.top < 1.0:
            keep = max(1, round(method.top * drifts.shape[-1]))
            least = drifts.abs().topk(keep, dim=-1).values[..., -1:]
            return torch.where(drifts.abs() >= least, drifts, 0.0)
        return drifts

    def _coded_sum(self, sent: Tensor, weights: Tensor, part: slice) -> Tensor:
        """Weighted mean of what arrives: coded twice, with what was lost added back."""
        if self._method.codec == "fp32":
            return (sent * weights).sum(0)
        residual, total = self._residual[:, :, part], self._sum_residual[:, part]
        message = sent + residual
        arrived = self._decoded(message)
        residual.copy_(message - arrived)
        mean = (arrived * weights).sum(0)
        if len(sent) == 2:  # two ranks swap whole messages: nothing is coded again
            return mean
        again = mean + total
        decoded = self._decoded(again)
        total.copy_(again - decoded)
        return decoded

    def _decoded(self, values: Tensor) -> Tensor:
        """What remains of every row after encoding and decoding."""
        size = values.shape[-1]
        memory = torch.zeros(self._codec.encoded_bytes(size), dtype=torch.uint8)
        out = torch.empty_like(values)
        rows = values.reshape(-1, size)
        for row, into in zip(rows, out.view(-1, size), strict=True):
            message = self._codec.over(memory, size)
            message.write(0, row)
            message.read(0, into)
        return out

    def _outer_step(
        self,
        column: int,
        outer: OuterOptimizer,
        part: slice,
        mean: Tensor,
        factor: float,
    ) -> None:
        """Nesterov and averaging are the library's; SlowMo is arXiv:1910.00643."""
        method = self._method
        if method.outer == "slowmo":
            lr = max(factor, 1e-3)  # of the inner step; its scale cancels
            slow = self._slow[column, part]
            slow.mul_(method.outer_momentum).add_(mean, alpha=1.0 / lr)
            self.base[column, part].sub_(slow, alpha=method.outer_lr * lr)
            return
        if method.anticipate:
            slow = self._slow[column, part]
            slow.mul_(method.outer_momentum).add_(mean)
            mean = mean.add(slow, alpha=method.outer_momentum)
            self.base[column, part].sub_(mean, alpha=method.outer_lr)
            return
        rule = OuterStep(method.outer, method.outer_lr, method.outer_momentum)
        outer.step(part.start, mean.contiguous(), rule)


def train(
    task: Task, method: Method, columns: Sequence[Column], batches: int
) -> list[float]:
    """Trains, and evaluates what all ranks hold in the end.

    Args:
        task: what is trained.
        method: how.
        columns: runs that are trained side by side.
        batches: of ``task.batch_size``, of all ranks together.

    Returns:
        What the task reports of each column.
    """
    streams = torch.stack([task.stream(c.seed, batches) for c in columns], dim=1)
    ranks = len(method.speeds)
    held = Replicas(task, columns, ranks, method.optimizer)
    if ranks == 1:
        _train_alone(held, method, streams)
        final = held.theta[0]
    else:
        final = _train_together(held, method, streams)
    return task.evaluate(task.views(final), held.buffers[0])


def _train_alone(held: Replicas, method: Method, streams: Tensor) -> None:
    batches, columns = streams.shape[:2]
    waiting: list[Tensor] = []
    for start in range(0, batches, method.batches_per_step):
        samples = streams[start : start + method.batches_per_step]
        held.gradients(1, samples.transpose(0, 1).reshape(1, columns, -1))
        if method.delay:
            waiting.append(held.grad.clone())
            if len(waiting) <= method.delay:
                continue
            held.grad.copy_(waiting.pop(0))
        held.step(1, rate((start + len(samples) / 2) / batches))


def _train_together(held: Replicas, method: Method, streams: Tensor) -> Tensor:
    """Runs the ranks tick by tick, with every fragment's windows on the way."""
    every = [round(1.0 / speed) for speed in method.speeds]
    total, size = len(streams), held.task.size
    sync = Synchroniser(held, method)
    bounds = [size * i // method.fragments for i in range(method.fragments + 1)]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    counts = torch.zeros(method.fragments, len(every))
    done, tick, opened = 0, 0, 0
    while done < total:
        tick += 1
        active = sum(tick % ticks == 0 for ticks in every)
        active = min(active, total - done)
        progress = (done + active / 2) / total
        held.gradients(active, streams[done : done + active])
        held.step(active, rate(progress))
        done += active
        counts[:, :active] += 1
        early = method.first_anchor and done < EARLY * total
        window = method.window_ticks(method.first_anchor if early else method.anchor)
        passed = tick - opened
        sync.adopt(tick, rate(progress))
        for index, part in enumerate(parts):
            if passed == window * (index + 1) // method.fragments:
                lag = window if method.lag < 0 else min(method.lag, window)
                sync.begin(part, tick + lag, counts[index])
                counts[index] = 0
        if passed == window:
            opened = tick
        sync.adopt(tick, rate(progress))
    sync.adopt(tick + 10**9, 0.0)
    if bool(counts.any()):
        sync.begin(slice(0, size), tick, counts.sum(0).clamp(max=1.0))
        sync.adopt(tick, 0.0)
    return sync.base
