"""Runs on one device: the user's loader under observation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, IterableDataset

from elche.coordination.accounts.delivered_times import BatchCost, DeliveredTimes
from elche.coordination.accounts.metrics import MetricsBook, RankReport
from elche.coordination.protocol.messages import Scalars
from elche.runtime.data.leased_data import BatchFeed
from elche.runtime.data.positions import EpochPositions, enumerate_batches
from elche.runtime.data.stream_data import StreamView
from elche.runtime.data.transfer import batch_length, to_device
from elche.runtime.notifications import RunNotifications
from elche.runtime.process.seeding import seed_rank
from elche.runtime.training import Training
from elche.runtime.watch.scaler_skips import ScalerSkips

WINDOW_S = 1.0


class SingleRun:
    """A run without communication: the user's loader on one device.

    Batches are moved there, samples seeded if asked. Nothing is ever synchronised, so a
    window is what was trained in about a second.

    Args:
        training: what is trained. What batches weigh is asked for each before it is
            moved, as on several ranks, so that a function that is wrong is found here
            too.
        device: where batches go.
        window_s: least length of a window.

    Attributes:
        notifications: what the user logged, and metrics of what has ended.
        progress_samples: samples of batches whose loop body has run.
        progress_steps: likewise, batches.
        was_left_early: no other rank leaves an epoch.
        is_in_epoch: whether the loop is inside an epoch.
    """

    def __init__(
        self, training: Training, device: torch.device, window_s: float = WINDOW_S
    ) -> None:
        self._training = training
        self._loader = training.loader
        self._device = device
        self._window_s = window_s
        self._feed: BatchFeed[int] | None = None
        self._book = MetricsBook(world_size=1)
        self._epoch = self._window = -1
        self._length = self._samples_before = self._batch = 0
        self._weight = 0.0
        self._has_scalars = False
        self._data: Any = None
        self._opened_s = self._transfer_s = 0.0
        self._times = DeliveredTimes()
        self.notifications = RunNotifications(0)
        self._skips = ScalerSkips(training.optimizer, self.notifications.scalars)
        self.progress_samples = 0
        self.progress_steps = 0.0
        self.is_in_epoch = self.was_left_early = False

    def attach(self) -> None:
        """Watches for steps that a GradScaler skips; seeds this process if asked."""
        self._skips.attach()
        if self._training.config.seed is not None:
            seed_rank(self._training.config.seed, 0)

    def leave(self) -> None:
        """Leaves the optimizer as it was. May be called twice."""
        self._skips.detach()

    def state_dict(self) -> dict[str, Any]:
        """What this run holds between epochs: its progress, as nothing is averaged."""
        return {
            "samples": self.progress_samples,
            "steps": float(self.progress_steps),
            "averaging": None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the progress of :meth:`state_dict`."""
        self.progress_samples = state["samples"]
        self.progress_steps = state["steps"]

    @property
    def samples_done(self) -> float:
        """Samples of the run so far."""
        return float(self.progress_samples)

    @property
    def samples_in_hand(self) -> int:
        """Samples of the batch in hand, 0 outside the loop."""
        if not self.is_in_epoch:
            return 0
        size = self._loader.batch_size
        if size is None or not self._length:
            return batch_length(self._data) or size or 1
        left = self._length - (self.progress_samples - self._samples_before)
        return min(size, left) if left > 0 else size

    @property
    def weight_in_hand(self) -> float:
        """What the batch in hand weighs in means; 0 outside the loop."""
        if not self.is_in_epoch or self._training.weights is None:
            return float(self.samples_in_hand)
        return self._weight

    def steps_left(self, steps: int) -> int:
        """How many of so many steps of the whole run are still to be taken."""
        return max(0, math.ceil(steps - self.progress_steps))

    def epoch(self, steps: int = -1) -> Iterator[Any]:
        """Begins the next epoch and hands out its batches.

        Args:
            steps: of the epoch at most; -1 for all of it.
        """
        number = self._begin_epoch()
        most = None if steps < 0 else steps
        by_position = self._has_positions
        batches = self._by_position(most) if by_position else islice(self._loader, most)
        weights = self._training.weights
        began_s = self._opened_s
        try:
            for data in batches:
                loaded_s = time.monotonic()
                self._data = data
                if weights is not None:
                    where = f"batch {self._batch} of epoch {self._epoch}"
                    self._weight = weights.of(data, where)
                on_cpu = self._device.type == "cpu"
                yield data if on_cpu else self._moved(data, loaded_s)
                now_s = time.monotonic()
                if number == self._epoch:
                    self._batch_done(began_s, loaded_s, now_s)
                began_s = now_s
        except GeneratorExit:  # as on several ranks, the batch in hand counts
            if number == self._epoch and time is not None:
                self._batch_done(began_s, loaded_s, time.monotonic())
            raise
        finally:
            # None: the interpreter has ended, and taken modules apart before this
            if number == self._epoch and time is not None:
                self._end_epoch()

    @property
    def _has_positions(self) -> bool:
        """Whether samples are drawn by position, not as the loader comes to them."""
        data = self._loader.dataset
        if isinstance(data, IterableDataset):
            return False  # nobody knows its length
        return self._training.config.seed is not None or isinstance(data, StreamView)

    def _by_position(self, most: int | None) -> Iterator[Any]:
        data = self._loader.dataset
        if isinstance(data, StreamView):
            data.begin_epoch(self._epoch)
        keys, sizes = enumerate_batches(self._loader, self._epoch, most)
        positions = EpochPositions(keys, sizes, self._epoch, self._training.config.seed)
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
        self._samples_before = self.progress_samples
        self.is_in_epoch, self._has_scalars = True, False
        self._batch = 0
        self._opened_s = time.monotonic()
        self._book.begin_epoch(self._epoch, self._opened_s)
        return self._epoch

    def _moved(self, data: Any, loaded_s: float) -> Any:
        moved = to_device(data, self._device)
        self._transfer_s = time.monotonic() - loaded_s
        return moved

    def _batch_done(self, began_s: float, loaded_s: float, now_s: float) -> None:
        samples, moved_s = self.samples_in_hand, self._transfer_s
        self.progress_samples += samples
        self.progress_steps += 1.0
        self._batch += 1
        self._skips.settle()
        times_s = began_s, loaded_s + moved_s, now_s
        self._times.add(BatchCost.measured(samples, times_s, moved_s))
        if now_s - self._opened_s >= self._window_s:
            self._end_window(now_s, self._drain())

    def _drain(self, *, final: bool = False) -> Scalars:
        self._skips.settle()
        return self.notifications.scalars.drain(final=final)

    def _end_window(
        self, now_s: float, scalars: Scalars, parameter_norm: float | None = None
    ) -> None:
        self._window += 1
        self._opened_s = now_s
        self._has_scalars |= bool(scalars)
        times, self._times = self._times, DeliveredTimes()
        report = RankReport(
            rank=0,
            samples=times.samples,
            busy_s=times.busy_s,
            data_wait_s=times.data_wait_s,
            transfer_s=times.transfer_s,
            parameter_norm=parameter_norm,
            scalars=scalars,
        )
        self._book.add(self._window, report)
        self.notifications.add(
            self._book.close_window(self._window, now_s, synchronisations=0)
        )

    def _end_epoch(self) -> None:
        """Ends the epoch, waiting for the device only if something was logged."""
        if not self.is_in_epoch:
            return
        self.is_in_epoch, self._data = False, None
        scalars = self._drain(final=True)
        norm = None
        if scalars or self._has_scalars:
            parameters = self._training.model.parameters()
            norm = float(get_total_norm([p.detach() for p in parameters]))
        now_s = time.monotonic()
        self._end_window(now_s, scalars, norm)
        self.notifications.add(self._book.end_epoch(now_s))


def _sampler_length(loader: DataLoader[Any]) -> int:
    """Samples of an epoch; 0 where nobody knows."""
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return 0
