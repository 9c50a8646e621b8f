"""The user's DataLoader, driven by leases instead of its own sampler.

A torch DataLoader draws index batches ahead of their use, cannot be told to wait, and
ends for good when its sampler does. So the sampler here never blocks: where no lease
has come yet it yields an empty batch, which costs nothing, comes out as
:data:`NO_BATCH`, and lets the loader draw again. Dataset, collate function, workers and
pinning are the user's.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class IndexBatch:
    """Keys of a dataset to load together, with a seed for each if asked."""

    keys: Sequence[Any]
    seeds: Sequence[int] | None = None


class _NoBatch:
    """What an empty index batch comes out as."""

    def __reduce__(self) -> str:
        return "NO_BATCH"


NO_BATCH = _NoBatch()


class LeasedDataset(Dataset[Any]):
    """The user's dataset, loading whole index batches; other attributes are its own."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        object.__setattr__(self, "_elche_dataset", dataset)

    def __getitems__(self, batch: IndexBatch) -> Any:
        dataset = self._elche_dataset
        if not batch.keys:
            return NO_BATCH
        if batch.seeds is not None:
            return _load_seeded(dataset, batch.keys, batch.seeds)
        many = getattr(dataset, "__getitems__", None)
        if many:
            return many(list(batch.keys))
        return [dataset[key] for key in batch.keys]

    def __len__(self) -> int:
        return len(self._elche_dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_elche_dataset":
            raise AttributeError(name)
        return getattr(self._elche_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._elche_dataset, name, value)

    def __getstate__(self) -> Any:
        return self._elche_dataset

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "_elche_dataset", state)


@dataclass(frozen=True, slots=True)
class LeasedCollate:
    """The user's collate function, which empty batches pass by.

    ``single`` is set for a loader without automatic batching: its keys are loaded one
    by one, and the function converts that one item.
    """

    collate: Callable[[Any], Any]
    single: bool = False

    def __call__(self, data: Any) -> Any:
        """Collates what the dataset gave."""
        if data is NO_BATCH:
            return NO_BATCH
        return self.collate(data[0] if self.single else data)


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
        self._refill = refill
        self._queued: deque[tuple[Tag, IndexBatch]] = deque()
        self._drawn: deque[Tag | None] = deque()
        self._ended = False
        self._load: Callable[[IndexBatch], Any] | None = None
        self._loader = leased_loader(loader, self, generator)
        self._iterator: Iterator[Any] | None = None

    def start(self, load: Callable[[IndexBatch], Any] | None = None) -> None:
        """Begins an epoch: forgets what was queued before.

        Args:
            load: makes a batch at once (a data set kept on the device), in place of
                the DataLoader.
        """
        self._load = load
        self._queued.clear()
        self._drawn.clear()
        self._ended = False
        self._iterator = None

    @property
    def has_work(self) -> bool:
        """Whether a batch is queued, or drawn and still to come out."""
        return bool(self._queued) or any(tag is not None for tag in self._drawn)

    def push(self, tag: Tag, batch: IndexBatch) -> None:
        """Queues an index batch; it comes out of :meth:`next` with its tag."""
        self._queued.append((tag, batch))

    def end(self) -> None:
        """Nothing more will be pushed in this epoch."""
        self._ended = True

    def discard(self) -> None:
        """Drops what is queued and what was drawn ahead."""
        self._queued.clear()
        self._drawn = deque(None for _ in self._drawn)

    def next(self) -> tuple[Tag, Any] | None:
        """The next loaded batch with its tag; None if none was there to load.

        Raises:
            Whatever the user's dataset or collate function raises.
        """
        if self._load is not None:
            if not self._queued and not self._ended:
                self._refill()
            if not self._queued:
                return None
            queued, batch = self._queued.popleft()
            return queued, self._load(batch)
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            data = next(self._iterator)
        except StopIteration:
            return None
        tag = self._drawn.popleft()
        if tag is None or data is NO_BATCH:
            return None
        return tag, data

    def finish(self) -> None:
        """Ends the epoch; workers of the user's loader stay if it keeps them."""
        self._ended = True
        self.discard()
        self._iterator = None

    def __iter__(self) -> Iterator[IndexBatch]:
        """The sampler's side: what the loader draws."""
        while True:
            if not self._queued and not self._ended:
                self._refill()
            if self._queued:
                tag, batch = self._queued.popleft()
                self._drawn.append(tag)
                yield batch
            elif self._ended:
                return
            else:
                self._drawn.append(None)
                yield IndexBatch(())

    def __len__(self) -> int:
        return len(self._queued)


def leased_loader(
    loader: DataLoader[Any], sampler: Any, generator: torch.Generator
) -> DataLoader[Any]:
    """The user's loader with another batch sampler; everything else as it was."""
    options: dict[str, Any] = {}
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["multiprocessing_context"] = loader.multiprocessing_context
    return DataLoader(
        LeasedDataset(loader.dataset),
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=LeasedCollate(
            loader.collate_fn or default_collate, single=loader.batch_sampler is None
        ),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=generator,
        **options,
    )


def horizon_batches(loader: DataLoader[Any]) -> int:
    """Batches that the loader draws ahead of the one it hands out."""
    return loader.num_workers * (loader.prefetch_factor or 2) + 1


def position_seed(seed: int, epoch: int, position: int) -> int:
    """The seed of a sample's augmentation, the same whatever rank loads it."""
    text = f"{seed}/{epoch}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def _load_seeded(dataset: Any, keys: Sequence[Any], seeds: Sequence[int]) -> list[Any]:
    """Loads each key with its own seed; in the training process, leaves no trace."""
    numpy = _numpy_random()
    in_worker = get_worker_info() is not None
    kept = None if in_worker else (random.getstate(), torch.get_rng_state())
    kept_numpy = None if in_worker or numpy is None else numpy.get_state()
    items = []
    try:
        for key, seed in zip(keys, seeds, strict=True):
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
            if numpy is not None:
                numpy.seed(seed & 0xFFFFFFFF)
            items.append(dataset[key])
    finally:
        if kept is not None:
            random.setstate(kept[0])
            torch.set_rng_state(kept[1])
        if numpy is not None and kept_numpy is not None:
            numpy.set_state(kept_numpy)
    return items


def _numpy_random() -> Any:
    """Numpy's global generator, if the program uses numpy at all."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random
