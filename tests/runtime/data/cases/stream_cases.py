"""Streams of the distributed tests, and the loop over them on a rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import elche
from elche.session.process import current_run, failing_together
from tests.distributed.cases.tasks import Numbered, Task, build, state_of, take_step
from tests.harness.logged import logged
from tests.harness.settings import nested


class Stream(IterableDataset[Any]):
    """So many samples of `Numbered`, in order, from a stream that knows its length."""

    def __init__(self, length: int) -> None:
        self.samples = Numbered(length)

    def __len__(self) -> int:
        return len(self.samples)

    def order(self) -> Iterator[int]:
        return iter(range(len(self.samples)))

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in self.order())


class Endless(Stream):
    """Goes on for ever, and does not say how long it is."""

    __len__ = None  # type: ignore[assignment]

    def order(self) -> Iterator[int]:
        while True:
            yield from range(len(self.samples))


class Shuffled(Stream):
    """Shuffles through a buffer, with Python's and torch's global generators."""

    def order(self) -> Iterator[int]:
        left = torch.randperm(len(self.samples)).tolist()
        buffer, left = left[:16], left[16:]
        while buffer:
            yield buffer.pop(random.randrange(len(buffer)))
            if left:
                buffer.append(left.pop())


class OwnGenerator(Stream):
    """Shuffles with a generator of its own, which nobody has seeded."""

    def order(self) -> Iterator[int]:
        mixed = list(range(len(self.samples)))
        random.SystemRandom().shuffle(mixed)
        return iter(mixed)


class ByWorker(Stream):
    """Divides itself among workers, as torch's documentation shows."""

    def order(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, len(self.samples), step))


def divide_by_worker(worker: int) -> None:
    """What torch's documentation shows for `worker_init_fn`."""
    info = get_worker_info()
    assert info is not None
    samples = info.dataset.samples
    info.dataset.samples = torch.utils.data.Subset(
        samples, range(worker, len(samples), info.num_workers)
    )


@dataclass(frozen=True)
class StreamTask:
    """What to train on which stream."""

    stream: type[Stream] = Stream
    samples: int = 100
    batch_size: int | None = 8
    epochs: int = 2
    num_workers: int = 0
    divides: bool = False
    samples_per_epoch: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Streamed:
    """What a rank saw."""

    orders: list[list[int]]
    draws: dict[tuple[int, int], float]
    state: dict[str, torch.Tensor]
    length: int
    warnings: list[str]


def streamed(task: StreamTask) -> Streamed:
    """Trains on the stream on this rank of a run, or on one device."""
    with failing_together():
        return _streamed(task)


def _streamed(task: StreamTask) -> Streamed:
    model, optimizer, _ = build(Task(samples=task.samples))
    stream = task.stream(task.samples)
    workers: dict[str, Any] = {"num_workers": task.num_workers}
    workers["persistent_workers"] = task.num_workers > 0
    if task.divides:  # where workers begin with a copy of what this process has now
        workers["worker_init_fn"] = divide_by_worker
        workers["multiprocessing_context"] = "spawn"
    loader = DataLoader(stream, task.batch_size, **workers)
    with logged("elche") as lines:
        model, optimizer, ours = elche.setup(
            model,
            optimizer,
            loader,
            samples_per_epoch=task.samples_per_epoch,
            **nested(task.options),
        )
        orders, draws = _train(task, model, optimizer, ours)
        length = len(ours)
        elche.shutdown()
    return Streamed(orders, draws, state_of(model), length, lines)


def _train(
    task: StreamTask, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[list[list[int]], dict[tuple[int, int], float]]:
    """The samples of each epoch that counted here, and what each one drew."""
    orders, draws = [], {}
    for epoch in range(task.epochs):
        order: list[int] = []
        for x, y, index, draw in loader:
            run = current_run()
            if run is None or run.current_samples:
                order += index.tolist()
                for number, value in zip(index.tolist(), draw.tolist(), strict=True):
                    draws[epoch, number] = value
            take_step(model, optimizer, x, y)
        orders.append(order)
    return orders, draws
