"""The positions of an epoch: enumerated once, on rank 0, and given to all ranks."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgpack
import torch
from torch.utils.data import DataLoader

from elche.comm.process_group import Group
from elche.coordination.ledger import BatchSizes
from elche.errors import ConfigError
from elche.runtime.leased_data import IndexBatch, position_seed


class EpochPositions:
    """The dataset keys of an epoch in order, cut into batches.

    Args:
        keys: key of every position; a tensor of int64, or a list of other keys.
        sizes: samples of every batch.
        epoch: the epoch.
        seed: seed of sample augmentation, None for none.
    """

    def __init__(
        self,
        keys: torch.Tensor | Sequence[Any],
        sizes: BatchSizes,
        epoch: int,
        seed: int | None,
    ) -> None:
        self._keys = keys
        self._seed = seed
        self.sizes = sizes
        self.epoch = epoch
        self._runs: list[tuple[int, int, int]] = []
        batch = position = 0
        for samples, count in sizes.runs:
            self._runs.append((batch, position, samples))
            batch += count
            position += samples * count
        self.num_batches = batch

    @property
    def has_integer_keys(self) -> bool:
        """Whether positions are indices, as of a sequence."""
        return isinstance(self._keys, torch.Tensor)

    def samples_of(self, batch: int) -> int:
        """Samples of a batch."""
        return self.sizes.run_of(batch)[0]

    def index_batch(
        self, batch: int, start: int = 0, stop: int | None = None
    ) -> IndexBatch:
        """Samples ``start`` to ``stop`` of a batch, as its loader gets them."""
        run = bisect_right(self._runs, batch, key=lambda run: run[0]) - 1
        first, position, samples = self._runs[run]
        begin = position + (batch - first) * samples
        end = begin + (samples if stop is None else stop)
        begin += start
        keys = self._keys[begin:end]
        plain = keys.tolist() if isinstance(keys, torch.Tensor) else list(keys)
        if self._seed is None:
            return IndexBatch(plain)
        return IndexBatch(
            plain,
            [position_seed(self._seed, self.epoch, at) for at in range(begin, end)],
        )


def enumerate_batches(
    loader: DataLoader[Any], epoch: int
) -> tuple[list[Any], BatchSizes]:
    """Draws an epoch from the user's batch sampler (or sampler).

    Draws the seed that a DataLoader draws first (but persistent workers only once), so
    that the order is the one that a plain loop over this loader would see.

    Raises:
        ConfigError: the sampler yields nothing.
    """
    if epoch == 0 or not loader.persistent_workers:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    if loader.batch_sampler is None:
        batches = [[key] for key in loader.sampler]
    else:
        batches = [list(batch) for batch in loader.batch_sampler]
    batches = [batch for batch in batches if batch]
    if not batches:
        raise ConfigError(
            "the sampler yields no batch: the dataset is empty, or smaller than "
            "batch_size with drop_last=True"
        )
    keys = [key for batch in batches for key in batch]
    return keys, BatchSizes.of([len(batch) for batch in batches])


def share_keys(group: Group, keys: list[Any] | None) -> torch.Tensor | list[Any]:
    """Sends rank 0's keys to all ranks; ``keys`` is None elsewhere.

    Raises:
        ConfigError: a key is nothing that can travel without pickle.
    """
    payload, kind = torch.empty(0, dtype=torch.int64), 0
    if keys is not None:
        payload, kind = _packed(keys)
    header = torch.tensor([kind, payload.numel()], dtype=torch.int64)
    group.broadcast(header, "sharing the positions of an epoch")
    kind, numel = header.tolist()
    dtype = torch.uint8 if kind else torch.int64
    if keys is None:
        payload = torch.empty(numel, dtype=dtype)
    group.broadcast(payload, "sharing the positions of an epoch")
    if not kind:
        return payload
    unpacked: list[Any] = msgpack.unpackb(payload.numpy().tobytes(), use_list=False)
    return list(unpacked)


def _packed(keys: list[Any]) -> tuple[torch.Tensor, int]:
    try:
        return torch.tensor([operator.index(key) for key in keys]), 0
    except (TypeError, RuntimeError):
        pass
    try:
        if any(isinstance(key, list) for key in keys):
            raise TypeError("a list would come out as a tuple")
        raw = msgpack.packb(keys)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the sampler yields keys like {keys[0]!r}; expected ints, strings, or "
            "tuples of them, which other ranks can be told without pickle"
        ) from error
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8), 1
