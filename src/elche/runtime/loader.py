"""What `elche.setup` returns in place of the user's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from elche.runtime.leased_data import BatchFeed
from elche.runtime.positions import EpochPositions, enumerate_batches
from elche.runtime.run import Run
from elche.runtime.transfer import batch_length, to_device


class _LoaderLike:
    """Everything but iteration is the user's loader's."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Batches of an epoch in a single process, whatever this rank's share."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


class RunLoader(_LoaderLike):
    """Hands out this rank's part of each epoch of a run.

    Under ``sync`` every rank gets a share of each global batch; under ``cadence`` each
    rank gets whole batches, as many as its speed allows, so a loop body runs a
    different number of times on each rank. ``len()`` is the single-process length.
    """

    def __init__(self, loader: DataLoader[Any], run: Run) -> None:
        super().__init__(loader)
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        return self._run.epoch()


class SingleLoader(_LoaderLike):
    """The user's loader on one device: batches moved there, samples seeded if asked.

    Attributes:
        samples_done: samples of batches whose loop body has run.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, seed: int | None
    ) -> None:
        super().__init__(loader)
        self._device = device
        self._seed = seed
        self._epoch = -1
        self.samples_done = 0
        self._feed: BatchFeed[int] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        batches = self._loader if self._seed is None else self._seeded()
        for data in batches:
            yield data if self._device.type == "cpu" else to_device(data, self._device)
            self.samples_done += self._loader.batch_size or batch_length(data)
        if self._loader.batch_size and not self._loader.drop_last:
            self.samples_done -= -_sampler_length(self._loader) % (
                self._loader.batch_size
            )

    def _seeded(self) -> Iterator[Any]:
        keys, sizes = enumerate_batches(self._loader, self._epoch)
        positions = EpochPositions(keys, sizes, self._epoch, self._seed)
        if self._feed is None:
            self._feed = BatchFeed(self._loader, torch.Generator(), lambda: None)
        self._feed.start()
        for batch in range(positions.num_batches):
            self._feed.push(batch, positions.index_batch(batch))
        self._feed.end()
        while (got := self._feed.next()) is not None:
            yield got[1]
        self._feed.finish()


def _sampler_length(loader: DataLoader[Any]) -> int:
    """Samples of an epoch; 0 where nobody knows."""
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return 0
