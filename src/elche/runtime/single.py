"""Runs on one device: the user's loader under observation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from torch.utils.data import IterableDataset

from elche.comm.tensors.nested import batch_length
from elche.coordination.accounts.epoch_parts import PartRanges
from elche.coordination.accounts.metrics import MetricsBook, RankReport
from elche.coordination.protocol.messages import Runs, Scalars
from elche.errors import ConfigError
from elche.runtime.data.epoch_course import FAR_AHEAD, EpochCourse, ranges_of
from elche.runtime.data.leased_data import BatchFeed
from elche.runtime.data.positions import enumerate_batches
from elche.runtime.data.seeds import seed_process
from elche.runtime.data.stream_data import StreamView
from elche.runtime.data.transfer import to_device
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.report.timeline import Timeline, write_part
from elche.runtime.training import RunParts, Training, generators_of
from elche.runtime.watch.observer import LoopObserver

WINDOW_S = 1.0


class SingleRun:
    """A run without communication: the user's loader on one device.

    Batches are moved to it, and samples seeded on request. Nothing is synchronised, so
    a window is about a second of training.

    Args:
        training: objects to train. Batches are weighed before they are moved, as on
            several ranks, so that a wrong ``weight_of`` is found here too.
        device: device that batches are moved to.
        window_s: minimum length of a window (s).

    Attributes:
        notifications: the user's scalars, and metrics of windows and epochs.
        timeline: timeline of its batches.
        progress_samples: samples of batches whose loop body has run.
        progress_steps: number of these batches.
        was_left_early: False: no other rank leaves an epoch.
        is_in_epoch: the loop is inside an epoch.
    """

    def __init__(
        self, training: Training, device: torch.device, window_s: float = WINDOW_S
    ) -> None:
        self._training = training
        self._loader = training.loader
        self._device = device
        self._window_s = window_s
        self._feed: BatchFeed[int] | None = None
        self._generator = torch.Generator()
        self._course: EpochCourse | None = None
        self._resumed: EpochCourse | None = None
        self._book = MetricsBook(1, -1, 0.0)
        self._epoch = self._window = -1
        self._length = self._samples_before = self._batch = 0
        self._size = self._stop = self._reported_samples = 0
        self._weight = self._steps_before = self._resumed_steps = 0.0
        self._has_scalars = False
        self._data: Any = None
        self._opened_s = self._done_s = 0.0  # of the window, and of its last batch
        self._arriving_s = self._transfer_s = 0.0  # until arrival, and the move's part
        self.notifications = RunNotifications(0)
        self.timeline = Timeline(0)
        self._observer = LoopObserver(training, self.notifications)
        self._graphs = self._observer.graphs
        self.progress_samples = 0
        self.progress_steps = 0.0
        self.is_in_epoch = self.was_left_early = self._has_left = False

    def attach(self) -> None:
        """Watches for steps that a GradScaler skips; seeds this process if asked."""
        self._observer.scaler.attach()
        seed_process(self._training.config.seed, 0, self._generator)

    def leave(self) -> None:
        """Removes all hooks, and writes the timeline. May be called twice."""
        self._observer.detach()
        if not self._has_left:
            write_part(self.timeline)
        self._has_left = True

    def steps_at(self, samples: float) -> float:
        """Steps so far: metrics are there as soon as their samples are trained."""
        return self.progress_steps

    def state_dict(self) -> dict[str, Any]:
        """State of this run: its progress, since nothing is averaged."""
        steps = self.progress_steps if self._course is None else self._steps_before
        return {"samples": self._samples_kept, "steps": float(steps), "averaging": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the progress of :meth:`state_dict`."""
        self.progress_samples = state["samples"]
        self.progress_steps = state["steps"]

    rank, world_size = 0, 1

    @property
    def timeout_s(self) -> float:
        """Deadline (s) for writing a checkpoint."""
        return self._training.config.timeout_s

    def agree(self, make: Callable[[], str], what: str) -> str:
        """Returns this rank's text: there is no other rank."""
        return make()

    def heeds_signals(self, heeds: bool) -> None:
        """Does nothing: a single process has no launcher to notify."""

    def report_saved(self, text: str) -> None:
        """Does nothing: a single process has no coordinator."""

    @property
    def why_no_cut(self) -> str:
        """Refusal of a checkpoint inside an epoch whose rest is unknown."""
        if self._course is not None:
            return ""
        return (
            "elche.save() inside this loop cannot record the rest of the epoch: write "
            "`for epoch in elche.epochs(n)` or call elche.save_every before, and with "
            "an IterableDataset give samples_per_epoch; or call it between epochs"
        )

    @property
    def _samples_kept(self) -> int:
        """Samples in the model, without batches whose backward pass is pending."""
        course = self._course
        return self.progress_samples - (0 if course is None else course.open_samples)

    def parts(self) -> RunParts:
        """Parts of a checkpoint, between epochs or at a cut of one."""
        training, course = self._training, self._course
        state = None if course is None else course.state_dict(self.progress_samples)
        epochs = {"next": self._epoch + (course is None), "course": state}
        return RunParts(
            model=training.model,
            optimizers=self._observer.optimizers(),
            copies=training.copies,
            generators={"feed": self._generator, **generators_of(training.loader)},
            is_common=True,
            state=self.state_dict(),
            epochs={**epochs, "schedules": [], "copies": []},
        )

    def described(self) -> dict[str, Any]:
        """Progress for a checkpoint's manifest."""
        config = self._training.config
        return {
            "samples": self._samples_kept,
            "steps": self.progress_steps,
            "policy": config.policy,
            "config": config.as_dict(),
        }

    def resume(self, state: dict[str, Any], epochs: dict[str, Any]) -> None:
        """Resumes from a checkpoint's state."""
        if self._epoch >= 0:
            raise ConfigError(
                "expected elche.resume() before the first epoch, got it after "
                f"{self._epoch + 1}; call it right after elche.setup"
            )
        self.load_state_dict(state)
        self._resumed_steps = state["steps"]
        self._epoch, course = epochs["next"] - 1, epochs["course"]
        if course is None:
            return
        if self.iterates_loader:
            raise ConfigError(
                "the checkpoint is inside an epoch of an IterableDataset; give "
                "elche.setup samples_per_epoch"
            )
        self._resumed = EpochCourse.from_state(course)
        self._resumed.samples_before += self.progress_samples
        done = self._resumed.sizes.batches_in(-course["samples_before"])
        self.progress_steps = state["steps"] + done

    @property
    def samples_done(self) -> float:
        """Samples of the run so far."""
        return float(self.progress_samples)

    @property
    def current_samples(self) -> int:
        """Samples of the current batch, 0 outside the loop."""
        if not self.is_in_epoch:
            return 0
        size = self._loader.batch_size
        if size is None or not self._length:
            return batch_length(self._data) or size or 1
        left = self._stop - self.progress_samples
        return min(size, left) if left > 0 else size

    @property
    def current_weight(self) -> float:
        """Weight of the current batch in means; 0 outside the loop."""
        if not self.is_in_epoch or self._training.weights is None:
            return float(self.current_samples)
        return self._weight

    def steps_left(self, steps: int) -> int:
        """Steps of the whole run that are still to be taken."""
        return max(0, math.ceil(steps - self.progress_steps))

    def epoch(self, steps: int = -1) -> Iterator[Any]:
        """Begins the next epoch, of at most ``steps`` steps; yields its batches."""
        if not self._training.pauses.begin_pass():
            self._end_epoch()  # of an iterator that is still held
            return
        number = self._begin_epoch()
        most = None if steps < 0 else steps
        is_theirs = self.iterates_loader
        batches = islice(self._loader, most) if is_theirs else self._by_position(most)
        weights, moves = self._training.weights, self._device.type != "cpu"
        began_s = self._opened_s
        try:
            for data in batches:
                ready_s = loaded_s = time.monotonic()
                self._data = data
                if weights is not None:
                    where = f"batch {self._batch} of epoch {self._epoch}"
                    self._weight = weights.of(data, where)
                if moves:
                    data, ready_s = to_device(data, self._device), time.monotonic()
                    self._transfer_s += ready_s - loaded_s
                yield data
                now_s = time.monotonic()
                if number == self._epoch:
                    self._batch_done(began_s, ready_s, now_s)
                began_s = now_s
        except GeneratorExit:  # as on several ranks, the current batch counts
            if number == self._epoch and time is not None:
                self._batch_done(began_s, ready_s, time.monotonic())
            raise
        finally:
            # None: the interpreter has ended, and taken modules apart before this
            if number == self._epoch and time is not None:
                self._end_epoch()

    @property
    def iterates_loader(self) -> bool:
        """True if batches come from the user's own loader, whose state they keep.

        Else samples are drawn by position.
        """
        data, pauses = self._loader.dataset, self._training.pauses
        if isinstance(data, IterableDataset):
            return True  # its length is unknown
        is_asked = self._training.config.seed is not None or pauses.is_active
        return not (is_asked or isinstance(data, StreamView))

    def _by_position(self, most: int | None) -> Iterator[Any]:
        data = self._loader.dataset
        if isinstance(data, StreamView):
            data.elche_reader.begin_epoch(self._epoch)
        course, self._resumed = self._resumed, None
        if course is None:
            keys, sizes = enumerate_batches(self._loader, self._epoch, most)
            whole, before = PartRanges(((0, sizes.num_samples),)), self.progress_samples
            course = EpochCourse(self._epoch, keys, sizes, whole, before, most)
        self._course = course
        pauses, is_end = self._training.pauses, False
        if pauses.is_active:
            self._observer.attach()
            self._graphs.begin_epoch(None)
        while not (course.is_over or is_end):
            left, open_batch = yield from self._part_of(course)
            course.done(left, open_batch)
            if left:
                is_end = pauses.wants_end()
                pauses.cut(is_end=is_end)
        self._course = None

    def _part_of(self, course: EpochCourse) -> Generator[Any, None, tuple[Runs, Runs]]:
        """Yields the remaining batches of an epoch, up to a cut.

        Returns the rest, and batches with a pending backward pass. The rest is empty
        after the last batch.
        """
        positions = course.positions(self._training.config.seed)
        if self._feed is None:
            self._feed = BatchFeed(self._loader, self._generator, lambda: None)
        self._feed.start(self._epoch)
        for batch in range(positions.num_batches):
            self._feed.push(batch, positions.index_batch(batch))
        self._feed.end()
        left: Runs = ()
        open_batch: Runs = ()
        sizes, pauses = positions.sizes, self._training.pauses
        while not left and (got := self._feed.next()) is not None:
            if pauses.is_active:
                self._graphs.begin((positions, got[0]), got[1])
            yield got[1]
            at = got[0] + 1
            if at < positions.num_batches and pauses.wants_cut():
                left = ((sizes.position_of(at), sizes.num_samples),)
                waiting = self._graphs.open_batches
                if len(waiting) == 1 and not self._graphs.has_passed:
                    waiting = []  # skipped, or trained by a method that is not seen
                if any(part is not positions for part, _ in waiting):
                    raise ConfigError(FAR_AHEAD)
                open_batch = ranges_of(sizes, [number for _, number in waiting])
        self._feed.finish(is_over=not left)
        return left, open_batch

    def _begin_epoch(self) -> int:
        """Begins an epoch, and ends one whose iterator is still held."""
        self._end_epoch()
        self._epoch += 1
        self._length = length_hint(self._loader.sampler)
        self._samples_before = self.progress_samples
        self._steps_before = float(self.progress_steps)
        if self._resumed is not None:
            self._samples_before = self._resumed.samples_before
            self._steps_before = self._resumed_steps
        self._size = (self._loader.batch_size or 0) if self._length else 0
        self._stop = self._samples_before + self._length
        self._reported_samples = self.progress_samples
        self.is_in_epoch, self._has_scalars = True, False
        self._batch = 0
        self._opened_s = self._done_s = time.monotonic()
        self._book = MetricsBook(1, self._epoch, self._opened_s)
        return self._epoch

    def _batch_done(self, began_s: float, ready_s: float, now_s: float) -> None:
        is_full = 0 < self._size <= self._stop - self.progress_samples
        samples = self._size if is_full else self.current_samples
        self.progress_samples += samples
        course = self._course
        if course is not None and course.is_cut:  # what is left of a batch is no step
            trained = self.progress_samples - course.samples_before
            self.progress_steps = self._steps_before + course.sizes.batches_in(trained)
        else:
            self.progress_steps += 1.0
        self._batch += 1
        self._arriving_s += ready_s - began_s
        self._done_s = now_s
        batch = "batch", self._batch - 1, began_s, ready_s, now_s, samples, 0.0
        self.timeline.record(batch)
        if now_s - self._opened_s >= self._window_s:
            self._end_window(now_s, self.notifications.scalars.drain())

    def _end_window(
        self, now_s: float, scalars: Scalars, parameter_norm: float | None = None
    ) -> None:
        self._window += 1
        self._has_scalars |= bool(scalars)
        report = RankReport(
            rank=0,
            samples=self.progress_samples - self._reported_samples,
            busy_s=self._done_s - self._opened_s,  # batches follow each other
            data_wait_s=max(0.0, self._arriving_s - self._transfer_s),
            transfer_s=self._transfer_s,
            parameter_norm=parameter_norm,
            scalars=scalars,
        )
        self._opened_s = self._done_s = now_s
        self._arriving_s = self._transfer_s = 0.0
        self._reported_samples = self.progress_samples
        self._book.add(self._window, report)
        closed = self._book.close_window(self._window, now_s, synchronisations=0)
        self.notifications.add(closed)

    def _end_epoch(self) -> None:
        """Ends the epoch, waiting for the device only if something was logged."""
        if not self.is_in_epoch:
            return
        self.is_in_epoch, self._data = False, None
        self._graphs.end_epoch()
        scalars = self.notifications.scalars.drain(final=True)
        norm = None
        if scalars or self._has_scalars:
            parameters = self._training.model.parameters()
            norm = float(get_total_norm([p.detach() for p in parameters]))
        now_s = time.monotonic()
        self._end_window(now_s, scalars, norm)
        self.notifications.add(self._book.end_epoch(now_s))
