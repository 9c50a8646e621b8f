"""Runs on one device: the user's loader under observation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, IterableDataset

from elche.coordination.accounts.metrics import (
    EPOCHS_KEPT,
    WINDOWS_KEPT,
    EpochMetrics,
    MetricsBook,
    RankReport,
    WindowMetrics,
)
from elche.coordination.protocol.messages import Scalars
from elche.runtime.data.batch_weights import BatchWeights
from elche.runtime.data.leased_data import BatchFeed
from elche.runtime.data.positions import EpochPositions, enumerate_batches
from elche.runtime.data.stream_data import StreamView
from elche.runtime.data.transfer import batch_length, to_device
from elche.runtime.loader import LoaderLike
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.watch.scaler_skips import ScalerSkips

WINDOW_S = 1.0


class SingleRun(LoaderLike):
    """The user's loader on one device: batches moved there, samples seeded if asked.

    Nothing is ever synchronised, so a window is what was trained in about a second.

    Args:
        loader: the user's loader.
        model: the model, on the device.
        device: where batches go.
        seed: of the samples' augmentation, None for none.
        window_s: least length of a window.
        weights: what batches weigh in means; None: their samples. Asked for each batch
            before it is moved, as on several ranks, so that a function that is wrong
            is found here too.

    Attributes:
        samples_done: samples of batches whose loop body has run.
        scalars: what the user logged.
        window_metrics: of windows that have ended, for whoever takes them out.
        epoch_metrics: of the last epochs that have ended.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        model: nn.Module,
        device: torch.device,
        seed: int | None,
        window_s: float = WINDOW_S,
        weights: BatchWeights | None = None,
    ) -> None:
        super().__init__(loader)
        self._weights = weights
        self._weight = 0.0
        self._batch = 0
        self._model = model
        self._device = device
        self._seed = seed
        self._window_s = window_s
        self._feed: BatchFeed[int] | None = None
        self._book = MetricsBook(world_size=1)
        self._epoch = self._window = -1
        self._size = loader.batch_size
        self._length = self._samples_before = 0
        self._is_training = self._has_scalars = False
        self._data: Any = None
        self._opened_s = 0.0
        self._measured = _Measured()
        self._skips: ScalerSkips | None = None
        self.samples_done = 0
        self.scalars = ScalarLog()
        self.window_metrics: deque[WindowMetrics] = deque(maxlen=WINDOWS_KEPT)
        self.epoch_metrics: deque[EpochMetrics] = deque(maxlen=EPOCHS_KEPT)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Tells of the steps that a GradScaler skips; see `ScalerSkips`."""
        self._skips = ScalerSkips(optimizer, self.scalars)
        self._skips.attach()

    def close(self) -> None:
        """Leaves the optimizer as it was. May be called twice."""
        if self._skips is not None:
            self._skips.detach()

    @property
    def samples_in_hand(self) -> int:
        """Samples of the batch in hand, 0 outside the loop."""
        if not self._is_training:
            return 0
        size = self._size
        if size is None or not self._length:
            return batch_length(self._data) or size or 1
        left = self._length - (self.samples_done - self._samples_before)
        return min(size, left) if left > 0 else size

    @property
    def weight_in_hand(self) -> float:
        """What the batch in hand weighs in means; 0 outside the loop."""
        if not self._is_training or self._weights is None:
            return float(self.samples_in_hand)
        return self._weight

    def __iter__(self) -> Iterator[Any]:
        number = self._begin_epoch()
        batches = self._by_position() if self._has_positions else self._loader
        began_s = self._opened_s
        try:
            for data in batches:
                loaded_s = time.monotonic()
                self._data = data
                if self._weights is not None:
                    where = f"batch {self._batch} of epoch {self._epoch}"
                    self._weight = self._weights.of(data, where)
                on_cpu = self._device.type == "cpu"
                yield data if on_cpu else self._moved(data, loaded_s)
                now_s = time.monotonic()
                if number == self._epoch:
                    self._batch_done(now_s, now_s - began_s, loaded_s - began_s)
                began_s = now_s
        finally:
            if number == self._epoch:
                self._end_epoch()

    @property
    def _has_positions(self) -> bool:
        """Whether samples are drawn by position, not as the loader comes to them."""
        data = self._loader.dataset
        if isinstance(data, IterableDataset):
            return False  # nobody knows its length
        return self._seed is not None or isinstance(data, StreamView)

    def _by_position(self) -> Iterator[Any]:
        data = self._loader.dataset
        if isinstance(data, StreamView):
            data.begin_epoch(self._epoch)
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

    def _begin_epoch(self) -> int:
        """Begins an epoch, and ends one whose iterator somebody still holds."""
        self._end_epoch()
        self._epoch += 1
        self._length = _sampler_length(self._loader)
        self._samples_before = self.samples_done
        self._is_training, self._has_scalars = True, False
        self._batch = 0
        self._opened_s = time.monotonic()
        self._book.begin_epoch(self._epoch, self._opened_s)
        return self._epoch

    def _moved(self, data: Any, loaded_s: float) -> Any:
        moved = to_device(data, self._device)
        self._measured.transfer_s += time.monotonic() - loaded_s
        return moved

    def _batch_done(self, now_s: float, busy_s: float, data_wait_s: float) -> None:
        samples = self.samples_in_hand
        self.samples_done += samples
        self._batch += 1
        if self._skips is not None:
            self._skips.settle()
        measured = self._measured
        measured.samples += samples
        measured.busy_s += busy_s
        measured.data_wait_s += data_wait_s
        if now_s - self._opened_s >= self._window_s:
            self._end_window(now_s, self._drain())

    def _drain(self, *, final: bool = False) -> Scalars:
        if self._skips is not None:
            self._skips.settle()
        return self.scalars.drain(final=final)

    def _end_window(
        self, now_s: float, scalars: Scalars, parameter_norm: float | None = None
    ) -> None:
        self._window += 1
        self._opened_s = now_s
        self._has_scalars |= bool(scalars)
        measured, self._measured = self._measured, _Measured()
        report = RankReport(
            rank=0,
            samples=measured.samples,
            busy_s=measured.busy_s,
            data_wait_s=measured.data_wait_s,
            transfer_s=measured.transfer_s,
            parameter_norm=parameter_norm,
            scalars=scalars,
        )
        self._book.add(self._window, report)
        self.window_metrics.append(
            self._book.close_window(self._window, now_s, synchronisations=0)
        )

    def _end_epoch(self) -> None:
        """Ends the epoch, waiting for the device only if something was logged."""
        if not self._is_training:
            return
        self._is_training, self._data = False, None
        scalars = self._drain(final=True)
        norm = None
        if scalars or self._has_scalars:
            norm = float(get_total_norm([p.detach() for p in self._model.parameters()]))
        now_s = time.monotonic()
        self._end_window(now_s, scalars, norm)
        self.epoch_metrics.append(self._book.end_epoch(now_s))


@dataclass(slots=True)
class _Measured:
    """What the window under way has cost so far."""

    samples: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0


def _sampler_length(loader: DataLoader[Any]) -> int:
    """Samples of an epoch; 0 where nobody knows."""
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return 0
