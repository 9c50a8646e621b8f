"""Batches from lease to device: the user's DataLoader, driven by leases.

A torch DataLoader draws index batches ahead of their use, cannot be made to wait, and
ends for good when its sampler does. So this sampler never blocks. Without a lease it
yields an empty batch, which costs nothing, is returned as :data:`NO_BATCH`, and lets
the loader draw again. Dataset, collate function, workers and pinning are the user's.
Loaded batches pass through the prefetcher, which moves them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import getitem
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, default_collate

from elche.runtime.data.batch_weights import BatchWeights
from elche.runtime.data.own_iteration import OwnIteration, own_loader
from elche.runtime.data.positions import EpochPositions, IndexBatch, check_length
from elche.runtime.data.prefetch import DevicePrefetcher
from elche.runtime.data.seeds import seed_generators, untraced_generators
from elche.runtime.data.stream_data import StreamView, loading_options
from elche.runtime.data.stream_reader import ForwardingDataset, Stamped
from elche.runtime.data.transfer import tensors_in
from elche.torch_internals.passes import mark_dynamic

Tag = TypeVar("Tag")


class _NoBatch:
    """Output of a DataLoader for an empty index batch."""

    def __reduce__(self) -> str:
        return "NO_BATCH"


NO_BATCH = _NoBatch()


class LeasedDataset(ForwardingDataset):
    """The user's dataset, loading whole index batches; other attributes are its own."""

    def __getitems__(self, batch: IndexBatch) -> Any:
        dataset = self._elche_held
        if not batch.keys:
            return NO_BATCH
        if isinstance(dataset, StreamView):
            return dataset.elche_reader.read(batch.epoch, batch.keys)
        if batch.seeds is not None:
            return _load_seeded(dataset, batch.keys, batch.seeds)
        many = getattr(dataset, "__getitems__", None)
        if many:
            return many(list(batch.keys))
        return list(map(getitem, repeat(dataset), batch.keys))

    def __len__(self) -> int:
        return len(self._elche_held)


@dataclass(frozen=True, slots=True)
class LeasedCollate:
    """The user's collate function, which is skipped for empty batches.

    ``single`` is set for a loader without automatic batching: its keys are loaded one
    by one, and the function converts that one item.
    """

    collate: Callable[[Any], Any]
    single: bool = False

    def __call__(self, data: Any) -> Any:
        """Collates the items that the dataset returned."""
        if data is NO_BATCH:
            return NO_BATCH
        is_stamped = isinstance(data, Stamped)
        items = data.data if is_stamped else data
        collated = self.collate(items[0] if self.single else items)
        return Stamped(collated, data.stamp) if is_stamped else collated


class _LeaseSampler(Generic[Tag]):
    """Batch sampler of a DataLoader that yields leased batches and never blocks.

    Separate from the feed: a reference cycle would keep a finished run and its memory
    until the next garbage collection.

    Args:
        refill: called when the loader draws and nothing is queued; may push.

    Attributes:
        queued: index batches that are to be drawn, with their tags.
        drawn: tags of drawn batches; None for empty or discarded ones.
        has_ended: nothing more will be queued.
        refills: request a lease when the loader draws.
    """

    def __init__(self, refill: Callable[[], None]) -> None:
        self._refill = refill
        self.queued: deque[tuple[Tag, IndexBatch]] = deque()
        self.drawn: deque[Tag | None] = deque()
        self.has_ended, self.refills = False, True

    def refill(self) -> bool:
        """Requests a lease, and returns True if anything is queued."""
        if not self.queued and not self.has_ended:
            self._refill()
        return bool(self.queued)

    def __iter__(self) -> Iterator[IndexBatch]:
        while True:
            if self.queued or (self.refills and self.refill()):
                tag, batch = self.queued.popleft()
                self.drawn.append(tag)
                yield batch
            elif self.has_ended:
                return
            else:
                self.drawn.append(None)
                yield IndexBatch(())


class BatchFeed(Generic[Tag]):
    """A stream of loaded batches, fed with index batches as leases come.

    Args:
        loader: the user's DataLoader.
        generator: source of randomness for its workers, different on every rank.
        refill: called when the loader draws and nothing is queued; may push.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        generator: torch.Generator,
        refill: Callable[[], None],
    ) -> None:
        self._sampler: _LeaseSampler[Tag] = _LeaseSampler(refill)
        self._dataset = loader.dataset
        self._loader = leased_loader(loader, self._sampler, generator)
        self._iterator: Iterator[Any] | None = None
        own = own_loader(loader)
        self._own = None if own is None else OwnIteration(own, self._draw_own)
        self._sampler.refills = own is None

    def start(self, epoch: int = 0) -> None:
        """Begins an epoch, or a part of one, with an empty queue."""
        self._sampler.queued.clear()
        self._sampler.drawn.clear()
        if self._own is not None:
            self._own.start(epoch)
        self._sampler.has_ended = False
        self._iterator = None

    @property
    def has_work(self) -> bool:
        """True if a batch is queued, or drawn and not yet returned."""
        sampler = self._sampler
        return bool(sampler.queued) or any(tag is not None for tag in sampler.drawn)

    def push(self, tag: Tag, batch: IndexBatch) -> None:
        """Queues an index batch; :meth:`next` returns it with its tag."""
        self._sampler.queued.append((tag, batch))

    def end(self) -> None:
        """Marks the end of the epoch: nothing more will be pushed."""
        self._sampler.has_ended = True

    def discard(self) -> None:
        """Drops queued batches, and those drawn ahead."""
        self._sampler.queued.clear()
        self._sampler.drawn = deque(None for _ in self._sampler.drawn)

    def next(self) -> tuple[Tag, Any] | None:
        """The next loaded batch with its tag; None if there is none yet.

        Raises:
            MismatchError: a loading process reads a different stream.
            ConfigError: the user's own iteration does not yield one batch for each
                drawn.
            Whatever the user's dataset or collate function raises.
        """
        if self._own is None:
            return self._draw()
        self._sampler.refill()
        return self._own.next() if self.has_work else None

    def _draw_own(self) -> tuple[Tag, Any] | None:
        """The next batch for the user's own iteration; skips empty batches."""
        got = None
        while got is None and self.has_work:
            got = self._draw()
        return got

    def _draw(self) -> tuple[Tag, Any] | None:
        if self._iterator is None:
            # It draws from this feed's generator, which is on the CPU whatever the
            # script made torch's default device.
            with torch.device("cpu"):
                self._iterator = iter(self._loader)
        try:
            data = next(self._iterator)
        except StopIteration:
            return None
        tag = self._sampler.drawn.popleft()
        if tag is None or data is NO_BATCH:
            return None
        if isinstance(data, Stamped) and isinstance(self._dataset, StreamView):
            self._dataset.elche_reader.check(data.stamp)
            data = data.data
        return tag, data

    def finish(self, *, is_over: bool = True) -> None:
        """Ends a part of an epoch; a loader with persistent workers keeps them."""
        self.end()
        self.discard()
        if self._own is not None and is_over:
            self._own.next(is_over=True)
        self._iterator = None


class LeasedBatches:
    """Source of the batches of a run's epochs.

    Args:
        loader: the user's DataLoader.
        generator: source of randomness for its workers, different on every rank.
        device: device that batches are moved to.
        refill: called when the loader draws and nothing is queued; may push.
        weights: weights of batches, taken before the move; None: their samples.

    Attributes:
        weight: weight of the last :meth:`take`'s batch; None without ``weights``.
        transfer_s: time (s) that the training thread spent on moving that batch.
        marks_dynamic: mark batch sizes as dynamic for a compiled model.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        generator: torch.Generator,
        device: torch.device,
        refill: Callable[[], None],
        weights: BatchWeights | None = None,
    ) -> None:
        self._loader = loader
        self._weights = weights
        self._epoch = 0
        self.weight: float | None = None
        self.transfer_s = 0.0
        self.marks_dynamic = False
        self._feed: BatchFeed[Any] = BatchFeed(loader, generator, refill)
        draw = self._feed.next if weights is None else self._weighed
        self._prefetcher: DevicePrefetcher[Any] = DevicePrefetcher.on(draw, device)
        self._take = draw if device.type == "cpu" else self._prefetcher.take

    @property
    def has_work(self) -> bool:
        """True if a batch is queued, loading, or on its way to the device."""
        return self._prefetcher.has_batch or self._feed.has_work

    def start(self, positions: EpochPositions) -> None:
        """Begins an epoch, on all ranks together.

        Raises:
            MismatchError: this rank's data differ from the other ranks'.
            ConfigError: a stream ends at once.
        """
        check_length(self._loader, positions)
        self._epoch = positions.epoch
        if isinstance(self._loader.dataset, StreamView):
            self._loader.dataset.elche_reader.begin_epoch(positions.epoch)
        self._feed.start(positions.epoch)

    def push(self, tag: Any, batch: IndexBatch) -> None:
        """Queues an index batch; :meth:`take` returns it with its tag.

        The tag is the batch's number in the epoch, or an object with it as ``step``.
        """
        self._feed.push(tag, batch)

    def take(self) -> tuple[Any, Any] | None:
        """The next batch, on the device; None if there is none yet.

        Raises:
            ConfigError: its weight is invalid.
        """
        got = self._take()
        self.transfer_s = self._prefetcher.transfer_s
        if got is not None and self.marks_dynamic:
            for tensor in tensors_in(got[1]) or ():
                mark_dynamic(tensor)
        if got is None or self._weights is None:
            return got
        (tag, self.weight), data = got
        return tag, data

    def _weighed(self) -> tuple[Any, Any] | None:
        """The next loaded batch, its tag and its weight."""
        got = self._feed.next()
        if got is None:
            return None
        assert self._weights is not None
        tag, data = got
        number = getattr(tag, "step", tag)
        weight = self._weights.of(data, f"batch {number} of epoch {self._epoch}")
        return (tag, weight), data

    def end(self) -> None:
        """Marks the end of the epoch: nothing more will be pushed."""
        self._feed.end()

    def discard(self) -> None:
        """Drops what is queued, drawn or moved ahead."""
        self._feed.discard()
        self._prefetcher.discard()

    def finish(self, *, is_over: bool) -> None:
        """Ends the epoch, or a part of it."""
        self._feed.finish(is_over=is_over)
        self._prefetcher.discard()


def leased_loader(
    loader: DataLoader[Any], sampler: Any, generator: torch.Generator
) -> DataLoader[Any]:
    """The user's loader with another batch sampler; everything else as it was."""
    return DataLoader(
        LeasedDataset(loader.dataset),
        batch_sampler=sampler,
        collate_fn=LeasedCollate(
            loader.collate_fn or default_collate, single=loader.batch_sampler is None
        ),
        generator=generator,
        **loading_options(loader),
    )


def horizon_batches(loader: DataLoader[Any]) -> int:
    """Batches that the loader draws ahead of the one it yields."""
    return loader.num_workers * (loader.prefetch_factor or 2) + 1


def _load_seeded(dataset: Any, keys: Sequence[Any], seeds: Sequence[int]) -> list[Any]:
    items = []
    with untraced_generators():
        for key, seed in zip(keys, seeds, strict=True):
            seed_generators(seed)
            items.append(dataset[key])
    return items
