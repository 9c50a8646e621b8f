"""The positions of an epoch: enumerated once, on one rank, and sent to all."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import length_hint
from typing import Any, NamedTuple
from weakref import WeakSet

import msgpack
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
)

from elche.comm.transport.process_group import Group
from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes, Range
from elche.coordination.accounts.epoch_parts import PartRanges
from elche.errors import ConfigError, MismatchError
from elche.runtime.data.seeds import position_seed

SHARING = "sharing the positions of an epoch"
SPARE = 1000  # batches of a sampler with a wrong ``len()``, beyond twice that
_ENDLESS: WeakSet[DataLoader[Any]] = WeakSet()
logger = logging.getLogger(__name__)


class IndexBatch(NamedTuple):
    """Dataset keys to load together in an epoch, with an optional seed for each."""

    keys: Sequence[Any]
    seeds: Sequence[int] | None = None
    epoch: int = 0


class EpochPositions:
    """The dataset keys of an epoch in order, cut into batches.

    Args:
        keys: key of every position; a tensor of int64, or a list of other keys.
        sizes: samples of every batch.
        epoch: the epoch.
        seed: seed of sample augmentation, None for none.
        most: limit on the user's batches drawn; None for a whole epoch.
        part: positions that these batches cover; None for all.
    """

    def __init__(
        self,
        keys: torch.Tensor | Sequence[Any],
        sizes: BatchSizes,
        epoch: int,
        seed: int | None,
        most: int | None = None,
        part: PartRanges | None = None,
    ) -> None:
        self.keys = keys
        self._part = part
        self.most = most
        self._seed = seed
        self.sizes = sizes
        self.epoch = epoch
        self.num_batches = sizes.num_batches
        # slicing a tensor costs ten times as much, and every batch is a slice
        self._array = keys.numpy() if isinstance(keys, torch.Tensor) else None

    def cut_by(self, cut: BatchCut) -> EpochPositions:
        """Returns the same epoch, cut into the local batches of windows."""
        sizes = self.sizes.cut_by(cut)
        return EpochPositions(
            self.keys, sizes, self.epoch, self._seed, self.most, self._part
        )

    @property
    def is_part(self) -> bool:
        """True if these positions are only a part of a cut epoch."""
        return self._part is not None

    def samples_of(self, batch: int) -> int:
        """Samples of a batch."""
        return self.sizes.run_of(batch)[0]

    def index_batch(
        self, batch: int, start: int = 0, stop: int | None = None
    ) -> IndexBatch:
        """Samples ``start`` to ``stop`` of a batch, as its loader gets them."""
        first = self.sizes.position_of(batch)
        end = first + (self.samples_of(batch) if stop is None else stop)
        begin = first + start
        ranges: Sequence[Range] = ((begin, end),)
        if self._part is not None:
            ranges = self._part.origins_of(ranges).ranges
        plain: list[Any] = []
        for begin, end in ranges:
            if self._array is None:
                plain += self.keys[begin:end]
            else:
                plain += self._array[begin:end].tolist()
        seed = self._seed
        if seed is None:
            return IndexBatch(plain, None, self.epoch)
        places = chain.from_iterable(range(*each) for each in ranges)
        seeds = [position_seed(seed, self.epoch, at) for at in places]
        return IndexBatch(plain, seeds, self.epoch)


def enumerate_batches(
    loader: DataLoader[Any], epoch: int, most: int | None = None
) -> tuple[list[Any], BatchSizes]:
    """Draws an epoch, or its first batches, from the user's batch sampler (or sampler).

    A DataLoader first draws a seed (with persistent workers, only once). This function
    draws it too, so that the order is that of a plain loop over this loader. As in a
    DataLoader, the sampler's iterator is made first: torchdata's samplers draw there.

    Raises:
        ConfigError: the sampler yields nothing.
    """
    by_key = loader.batch_sampler is None
    sampler: Any = loader.sampler if by_key else loader.batch_sampler
    drawn = iter(sampler)
    if epoch == 0 or not loader.persistent_workers:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    copied = ([each] if by_key else list(each) for each in drawn)
    batches = [batch for batch in _first_of(copied, loader, most) if batch]
    if not batches:
        raise ConfigError(
            "the sampler yields no batch: the dataset is empty, or smaller than "
            "batch_size with drop_last=True"
        )
    keys = list(chain.from_iterable(batches))
    return keys, BatchSizes.of([len(batch) for batch in batches])


def _first_of(drawn: Iterator[Any], loader: DataLoader[Any], most: int | None) -> Any:
    """At most ``most`` values of a sampler; ``len(loader)`` if it is endless."""
    length = length_hint(loader, -1)
    if length < 0 or (most is not None and most <= length):
        return islice(drawn, most)
    first, state = [*islice(drawn, length)], torch.get_rng_state()
    if loader in _ENDLESS:
        return first
    first += islice(drawn, length + SPARE)
    if len(first) == 2 * length + SPARE:
        torch.set_rng_state(state)
        _ENDLESS.add(loader)
        text = "elche: the loader's sampler is endless: an epoch is len() = %d batches"
        logger.warning(text, length)
        del first[length:]
    return first[:most]


def drawn_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler of single samples; a batch sampler of the user's own is one."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def check_length(loader: DataLoader[Any], positions: EpochPositions) -> None:
    """Refuses an epoch that does not fit this rank's data set.

    Checks only torch's own samplers, whose keys and lengths are reliable.

    Raises:
        MismatchError: the data set has another length than rank 0's, whose sampler
            drew the epoch.
    """
    sampler = drawn_sampler(loader)
    batches: Any = loader.batch_sampler
    known = type(sampler) in (SequentialSampler, RandomSampler)
    keys = positions.keys  # indices of a sequence, or anything else
    if positions.is_part or not known or not isinstance(keys, torch.Tensor):
        return
    samples, length = len(sampler), len(loader.dataset)  # type: ignore[arg-type]
    if batches is not None and batches.drop_last:
        samples -= samples % batches.batch_size
    if positions.most is not None:
        batch_size = 1 if batches is None else batches.batch_size
        samples = min(samples, positions.most * batch_size)
    drawn, last = positions.sizes.num_samples, int(keys.max())
    if samples != drawn or last >= length:
        raise MismatchError(
            f"the data set has {length} samples on this rank, an epoch of {samples}, "
            f"but rank 0 drew epoch {positions.epoch} with {drawn}, up to index "
            f"{last}; change the length of a data set between epochs, and equally "
            "on every rank"
        )


def share_keys(
    group: Group, keys: list[Any] | None, source: int = 0
) -> torch.Tensor | list[Any]:
    """Sends one rank's keys to all ranks; ``keys`` is None elsewhere.

    Raises:
        ConfigError: a key cannot be sent without pickle.
    """
    payload, kind = torch.empty(0, dtype=torch.int64, device="cpu"), 0
    if keys is not None:
        payload, kind = packed_keys(keys)
    header = torch.tensor([kind, payload.numel()], dtype=torch.int64, device="cpu")
    group.broadcast(header, SHARING, source)
    kind, numel = header.tolist()
    dtype = torch.uint8 if kind else torch.int64
    if keys is None:
        payload = torch.empty(numel, dtype=dtype, device="cpu")
    group.broadcast(payload, SHARING, source)
    if not kind:
        return payload
    unpacked: list[Any] = msgpack.unpackb(payload.numpy().tobytes(), use_list=False)
    return list(unpacked)


def packed_keys(keys: list[Any]) -> tuple[torch.Tensor, int]:
    """Keys as a tensor, and 1 if the tensor holds encoded bytes.

    Raises:
        ConfigError: a key cannot be sent without pickle.
    """
    try:
        return torch.frombuffer(array("q", keys), dtype=torch.int64), 0
    except (TypeError, OverflowError):
        pass
    try:
        if any(isinstance(key, list) for key in keys):
            raise TypeError("a list would come out as a tuple")
        raw = msgpack.packb(keys)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the sampler yields keys like {keys[0]!r}; expected ints, strings, or "
            "tuples of them, which are sent to other ranks without pickle"
        ) from error
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8), 1
