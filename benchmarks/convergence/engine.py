"""Trains virtual ranks in one process, by the arithmetic of `elche.comm`.

Time is counted in *ticks*, batches of the fastest rank. A rank of half the speed ends a
batch at every second tick. Batches are those of local steps: a batch of the task, or
what it is cut into.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.convergence.method import Method
from benchmarks.convergence.replicas import Column, Replicas
from benchmarks.convergence.synchroniser import Synchroniser
from benchmarks.convergence.tasks import Task


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

    Raises:
        ValueError: the task's batch cannot be cut into as many equal parts.
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
        final = _train_in_windows(held, method, streams)
    return task.evaluate(task.views(final))


def _train_alone(held: Replicas, method: Method, streams: Tensor) -> None:
    for at, samples in enumerate(streams):
        held.gradients([0], samples[None])
        held.clip([0])
        held.step([0], method.rate_at((at + 0.5) / len(streams)))


def _train_in_windows(held: Replicas, method: Method, streams: Tensor) -> Tensor:
    """Runs the ranks tick by tick, with their windows on the way."""
    total, window = len(streams), method.window_ticks
    lag = window if method.lag < 0 else min(method.lag, window)
    sync = Synchroniser(held, method)
    counts = torch.zeros(len(method.speeds))
    done = tick = 0
    while done < total:
        tick += 1
        active = method.active_at(tick)[: total - done]
        held.gradients(active, streams[done : done + len(active)])
        held.clip(active)
        held.step(active, method.rate_at((done + len(active) / 2) / total))
        done += len(active)
        counts[active] += 1
        sync.adopt(tick)
        if tick % window == 0:
            sync.begin(tick + lag, counts)
            counts = torch.zeros(len(method.speeds))
            sync.adopt(tick)
    sync.adopt(tick + 10**9)
    if bool(counts.any()):
        sync.begin(tick, counts)
        sync.adopt(tick)
    return sync.base
