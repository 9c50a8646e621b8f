"""Trains virtual ranks in one process, by the arithmetic of `elche.comm`.

Time is counted in *ticks*, batches of the fastest rank. A rank of half the speed ends a
batch at every second tick. Batches are those of local steps: a batch of the task, or
what it is cut into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from benchmarks.convergence.method import Method
from benchmarks.convergence.replicas import Column, Replicas
from benchmarks.convergence.synchroniser import (
    Synchroniser,
    decoded,
    largest,
)
from benchmarks.convergence.tasks import Task
from elche.comm.codec.codec import codec_named


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
    drawn = [task.stream(c.seed, batches) for c in columns]
    size = task.batch_size // method.cut
    if size * method.cut != task.batch_size:
        raise ValueError(f"{task.batch_size} samples do not divide by {method.cut}")
    streams = torch.stack([each.view(-1, size) for each in drawn], dim=1)
    ranks = len(method.speeds)
    held = Replicas(task, columns, ranks, method.optimizer)
    if ranks == 1:
        _train_alone(held, method, streams)
        final = held.theta[0]
    else:
        final = _train_together(held, method, streams)
    return task.evaluate(task.views(final), held.buffers[0])


def _train_alone(held: Replicas, method: Method, streams: Tensor) -> None:
    batches, size = len(streams), method.batches_per_step
    is_compressed = method.top < 1.0 or method.codec != "fp32"
    compressor = Compressor(held, method) if is_compressed else None
    waiting: list[Tensor] = []
    before = held.theta.clone()
    for start in range(0, batches, size):
        samples = streams[start : start + size]
        if method.extrapolated:
            now = held.theta.clone()
            held.theta.add_(now - before, alpha=method.delay)
            held.gradients([0], _union(samples))
            held.theta.copy_(now)
            before = now
        elif compressor is None:
            held.gradients([0], _union(samples))
        else:
            compressor.gradients(samples)
        held.clip([0])
        if method.delay:
            waiting.append(held.grad.clone())
            if len(waiting) <= method.delay:
                continue
            held.grad.copy_(waiting.pop(0))
        held.step([0], method.rate_at((start + len(samples) / 2) / batches))


def _union(samples: Tensor) -> Tensor:
    """Batches (batches, columns, samples) as one of each column."""
    return samples.transpose(0, 1).reshape(1, samples.shape[1], -1)


@final
class Compressor:
    """Gradients of equal ranks under `sync` that travel compressed, every step.

    What a rank does not send is added to its next gradient (error feedback).

    Args:
        held: one device.
        method: how many batches make a step, and what remains of their gradients.
    """

    def __init__(self, held: Replicas, method: Method) -> None:
        self._held = held
        self._method = method
        self._codec = codec_named(method.codec)
        shape = (method.batches_per_step, *held.grad.shape[1:])
        self._residual = torch.zeros(shape)

    def gradients(self, samples: Tensor) -> None:
        """Mean of what arrives of every batch's gradient.

        Args:
            samples: of shape (batches, columns, samples).
        """
        total = torch.zeros_like(self._held.grad[0])
        for residual, batch in zip(self._residual, samples, strict=False):
            self._held.gradients([0], batch[None])
            message = self._held.grad[0] + residual
            sent = message
            if self._method.top < 1.0:
                sent = largest(sent, self._method.top)
            if self._method.codec != "fp32":
                sent = decoded(self._codec, sent)
            residual.copy_(message - sent)
            total += sent
        self._held.grad[0] = total / len(samples)


def _train_in_common(
    held: Replicas, method: Method, streams: Tensor, start: int, stop: int
) -> None:
    """The first rank takes steps with the mean gradient of a batch of every rank.

    Or of so many batches as the method says.
    """
    total, size = len(streams), method.first_batches or len(method.speeds)
    for begin in range(start, stop, size):
        samples = streams[begin : min(begin + size, stop)]
        held.gradients([0], _union(samples))
        held.clip([0])
        held.step([0], method.rate_at((begin + len(samples) / 2) / total))


def _train_together(held: Replicas, method: Method, streams: Tensor) -> Tensor:
    """Common steps, windows, common steps; as the method says."""
    total = len(streams)
    first = round(method.first_sync * total)
    last = total - round(method.last_sync * total)
    if first:
        _train_in_common(held, method, streams, 0, first)
        held.spread()
    base = _train_in_windows(held, method, streams, first, last)
    if last == total:
        return base
    held.theta[0] = base
    for moment in held.state:
        moment[0] = moment.mean(0)
    _train_in_common(held, method, streams, last, total)
    return held.theta[0]


def _train_in_windows(
    held: Replicas, method: Method, streams: Tensor, start: int, stop: int
) -> Tensor:
    """Runs the ranks tick by tick, with their windows on the way."""
    total = len(streams)
    sync = Synchroniser(held, method)
    counts = torch.zeros(len(method.speeds))
    done, tick, opened = start, 0, 0
    while done < stop:
        tick += 1
        active = method.active_at(tick)[: stop - done]
        if not active:
            continue
        progress = (done + len(active) / 2) / total
        held.gradients(active, streams[done : done + len(active)])
        held.clip(active)
        factor = method.rate_at(progress) * _rewarmed(method, tick - opened)
        held.step(active, factor)
        done += len(active)
        counts[active] += 1
        window = method.window_ticks(method.anchor_at(done / total))
        passed = tick - opened
        sync.adopt(tick, progress)
        if passed == window:
            lag = window if method.lag < 0 else min(method.lag, window)
            sync.begin(tick + lag, counts)
            counts = torch.zeros(len(method.speeds))
        if passed >= window:
            opened = tick
        sync.adopt(tick, progress)
    sync.adopt(tick + 10**9, stop / total)
    if bool(counts.any()):
        sync.begin(tick, counts.clamp(max=1.0))
        sync.adopt(tick, stop / total)
    return sync.base


def _rewarmed(method: Method, passed: int) -> float:
    """Factor on the learning rate in the first ticks of a window."""
    return min(1.0, passed / (method.rewarm + 1))
