"""Batches from lease to device: the feed that loads, the prefetcher that moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from elche.runtime.data.batch_weights import BatchWeights
from elche.runtime.data.leased_data import BatchFeed, IndexBatch
from elche.runtime.data.positions import EpochPositions, check_length
from elche.runtime.data.prefetch import DevicePrefetcher
from elche.runtime.data.stream_data import StreamView
from elche.runtime.data.transfer import tensors_in
from elche.torch_internals.passes import mark_dynamic


class LeasedBatches:
    """Source of the batches of a run's epochs.

    Args:
        loader: the user's DataLoader.
        generator: source of randomness for its workers, different on every rank.
        device: where batches go.
        refill: called when the loader draws and nothing is queued; may push.
        weights: what batches weigh, asked before they are moved; None: their samples.

    Attributes:
        weight: of the batch that the last :meth:`take` gave; None without ``weights``.
        marks_dynamic: batches vary in size, and a compiled model is told so.
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
        self._device = device
        self._weights = weights
        self._epoch = 0
        self.weight: float | None = None
        self.marks_dynamic = False
        self._feed: BatchFeed[Any] = BatchFeed(loader, generator, refill)
        draw = self._feed.next if weights is None else self._weighed
        self._prefetcher: DevicePrefetcher[Any] = DevicePrefetcher.on(draw, device)
        self._take = draw if device.type == "cpu" else self._prefetcher.take

    @property
    def has_work(self) -> bool:
        """True if a batch is queued, loading, or on its way to the device."""
        return self._prefetcher.has_batch or self._feed.has_work

    @property
    def transfer_s(self) -> float:
        """Seconds of the training thread that the last :meth:`take` spent on moving."""
        return self._prefetcher.transfer_s

    def start(self, positions: EpochPositions) -> None:
        """Begins an epoch, on all ranks together.

        Raises:
            MismatchError: this rank's data are not those of the others.
            ConfigError: a stream ends at once.
        """
        check_length(self._loader, positions)
        self._epoch = positions.epoch
        if isinstance(self._loader.dataset, StreamView):
            self._loader.dataset.elche_reader.begin_epoch(positions.epoch)
        self._feed.start(positions.epoch)

    def push(self, tag: Any, batch: IndexBatch) -> None:
        """Queues an index batch; it comes out of :meth:`take` with its tag.

        The tag is its number in the epoch, or has that as ``step``.
        """
        self._feed.push(tag, batch)

    def take(self) -> tuple[Any, Any] | None:
        """The next batch, on the device; None if none was there to load.

        Raises:
            ConfigError: it weighs what no batch can.
        """
        got = self._take()
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
        """Nothing more will be pushed in this epoch."""
        self._feed.end()

    def discard(self) -> None:
        """Drops what is queued, drawn or moved ahead."""
        self._feed.discard()
        self._prefetcher.discard()

    def finish(self, *, is_over: bool) -> None:
        """Ends the epoch, or a part of it."""
        self._feed.finish(is_over=is_over)
        self._prefetcher.discard()
