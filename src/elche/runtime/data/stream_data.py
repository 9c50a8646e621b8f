"""Iterable data sets on several ranks: one stream, read by position.

A stream cannot be indexed. So every process that loads (each rank, or each of its
DataLoader workers) reads its own copy forward, and keeps only its leased positions; it
starts again for a position before its current one (a returned lease). So leases,
balanced shares, exactly-once and tails work as for other data sets.

Guaranteed: every position contributes exactly once, *if* the stream yields the
same samples in the same order in every process. Streams that draw from the global
generators of Python, torch or numpy do: those are reseeded at every position. The first
samples of each epoch are compared between all ranks and all workers. So a stream
that shuffles with its own unseeded generator, or divides itself among ranks, is
refused by name. Division among workers is undone: while a stream is read,
``torch.utils.data.get_worker_info()`` reports none.

Each process pays for reading the whole stream, and some 20 microseconds per sample for
the seeds.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from elche.config_checks import check_whole
from elche.errors import ConfigError
from elche.runtime.data.own_iteration import USER_LOADER
from elche.runtime.data.stream_reader import ForwardingDataset, StreamReader


class StreamView(ForwardingDataset):
    """An iterable data set that is read by epoch and position.

    Other attributes are the data set's own. Made by :func:`stream_loader`.
    """

    def __init__(
        self, stream: Any, length: int, loads_here: bool, seed: int | None
    ) -> None:
        super().__init__(StreamReader(stream, length, loads_here, seed))

    @property
    def elche_reader(self) -> StreamReader:
        """The reader of the stream."""
        reader: StreamReader = self._elche_held
        return reader

    def __len__(self) -> int:
        return self.elche_reader.length

    def _elche_target(self) -> Any:
        return self.elche_reader.stream


def by_position(
    loader: DataLoader[Any],
    samples_per_epoch: int | None,
    world_size: int,
    seed: int | None,
) -> DataLoader[Any]:
    """Returns the loader, or a loader that reads its stream by position.

    On one device a stream is left alone, unless its samples are to be counted or drawn
    by a seed.

    Args:
        loader: the user's DataLoader.
        samples_per_epoch: positions of an epoch of a stream; None for its length.
        world_size: number of ranks.
        seed: seed of the run; None for none.

    Raises:
        ConfigError: the length is not a whole number above 0, is given for a data set
            that is not an IterableDataset, or is missing.
    """
    length = _stream_length(loader, samples_per_epoch)
    if length is None and world_size > 1 and _is_stream(loader):
        raise ConfigError(
            f"how long is an epoch of the stream {type(loader.dataset).__name__}? On "
            "several ranks its length must be known: give the dataset __len__, or "
            "elche.setup(..., samples_per_epoch=N)"
        )
    alone = world_size == 1 and samples_per_epoch is None and seed is None
    return loader if length is None or alone else stream_loader(loader, length, seed)


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _stream_length(
    loader: DataLoader[Any], samples_per_epoch: int | None
) -> int | None:
    """Positions of an epoch of a stream; None if unknown, or not a stream."""
    if samples_per_epoch is None:
        with contextlib.suppress(TypeError, NotImplementedError):
            return len(loader.dataset) if _is_stream(loader) else None  # type: ignore[arg-type]
        return None
    check_whole("samples_per_epoch", samples_per_epoch, 1)
    if not _is_stream(loader):
        raise ConfigError(
            "samples_per_epoch is only for an IterableDataset, got "
            f"{type(loader.dataset).__name__}, whose sampler gives the length"
        )
    return samples_per_epoch


def stream_loader(
    loader: DataLoader[Any], length: int, seed: int | None = None
) -> DataLoader[Any]:
    """Makes a loader of a stream's positions, with the user's other options.

    Args:
        loader: the user's DataLoader, over an IterableDataset.
        length: positions of an epoch: samples, or whole batches where the loader has
            ``batch_size=None``.
        seed: seed of the global generators during reads; None leaves them alone.
    """
    made: DataLoader[Any] = DataLoader(
        StreamView(loader.dataset, length, loader.num_workers == 0, seed),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        **loading_options(loader),
    )
    setattr(made, USER_LOADER, loader)
    return made


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Loading options of a loader, for another one like it."""
    options = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["multiprocessing_context"] = loader.multiprocessing_context
    return options
