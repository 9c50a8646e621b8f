"""Data: streams, samplers, workers and batches of other kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from benchmarks.features.feature import (
    BATCH_SIZE,
    CLASSES,
    EPOCHS,
    SAMPLES,
    Seen,
    Trained,
    adamw,
    batches_of,
    feature,
    labelled,
    network,
    step,
    trained,
)


class Stream(IterableDataset[Any]):
    """Samples one after the other, as from a file."""

    def __iter__(self) -> Iterator[Any]:
        data = labelled()
        return (data[index] for index in range(SAMPLES))


@feature(why="`samples_per_epoch=` says its length")
def iterable(elche: Any) -> Trained:
    """IterableDataset, its length said."""
    return _streamed(elche, samples_per_epoch=SAMPLES)


@feature(*2 * ["N length must be known"], why="the error says how to give one")
def iterable_unsized(elche: Any) -> Trained:
    """IterableDataset without a length."""
    return _streamed(elche)


def _streamed(elche: Any, **options: Any) -> Trained:
    model, loader = network(), batches_of(Stream(), shuffle=None)
    return trained(elche, model, adamw(model), loader, **options)


class Batch:
    """What a `collate_fn` made, and knows how to move."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.x = torch.stack([x for x, _ in samples])
        self.y = torch.stack([y for _, y in samples])

    def to(self, device: Any) -> Batch:
        """Moves the batch."""
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


@feature()
def custom_batch(elche: Any) -> Trained:
    """A batch class of the user's, with `.to`."""
    model, loader, seen = network(), batches_of(collate_fn=Batch), Seen()
    optimizer = adamw(model)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for batch in loader:
            loss = F.cross_entropy(model(batch.x), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen(loss, len(batch.y))
    return Trained(model, optimizer, seen)


def _padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Classes as tokens; a sequence is as long as its first input says."""
    ends = [int(x[0].abs() * 4) + 2 for x, _ in samples]
    rows = [(x * 2).int().abs() % CLASSES for x, _ in samples]
    rows = [row[:end] for row, end in zip(rows, ends, strict=True)]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"tokens": tokens[:, :-1].clamp(0), "labels": tokens[:, 1:].long()}


@feature(why="the loss is a mean over tokens: `weight_of=` counts them")
def variable_length(elche: Any) -> Trained:
    """Sequences padded by `collate_fn`, batches as dicts."""
    model: nn.Module = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES))
    loader, seen = batches_of(collate_fn=_padded), Seen()
    optimizer = adamw(model)
    model, optimizer, loader = elche.setup(
        *(model, optimizer, loader),
        weight_of=lambda batch: (batch["labels"] != -100).sum(),
    )
    for _epoch in range(EPOCHS):
        for batch in loader:
            logits = model(batch["tokens"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen(loss, len(batch["labels"]))
    return Trained(model, optimizer, seen)


@feature()
def weighted_sampler(elche: Any) -> Trained:
    """WeightedRandomSampler with its own generator."""
    weights = torch.linspace(0.1, 1, SAMPLES).tolist()
    draw = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler(weights, SAMPLES, generator=draw)
    model, loader = network(), batches_of(shuffle=None, sampler=sampler)
    return trained(elche, model, adamw(model), loader)


@feature()
def batch_sampler(elche: Any) -> Trained:
    """A `batch_sampler` of the user's."""
    sampler = BatchSampler(RandomSampler(range(SAMPLES)), BATCH_SIZE, drop_last=False)
    loader = batches_of(batch_size=1, shuffle=None, batch_sampler=sampler)
    model = network()
    return trained(elche, model, adamw(model), loader)


@feature(why="of one replica; elche divides the data, more replicas are refused")
def distributed_sampler(elche: Any) -> Trained:
    """DistributedSampler and `set_epoch`."""
    data = labelled()
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    model, loader = network(), batches_of(data, shuffle=None, sampler=sampler)
    optimizer, seen = adamw(model), Seen()
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            step(model, optimizer, x, y, seen)
    return Trained(model, optimizer, seen)


@feature()
def workers(elche: Any) -> Trained:
    """Persistent workers; `drop_last`."""
    loader = batches_of(num_workers=2, persistent_workers=True, drop_last=True)
    model = network()
    return trained(elche, model, adamw(model), loader)
