"""The epochs of a run on one rank, one after another."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes
from elche.coordination.accounts.epoch_parts import PartRanges, whole_end
from elche.coordination.protocol.events import BarrierReached, EpochOpened, Event, Left
from elche.coordination.protocol.instructions import (
    BarrierPassed,
    BeginEpoch,
    EndEpoch,
)
from elche.coordination.sync.step_reports import EARLY
from elche.errors import CommunicationError, ConfigError, MismatchError
from elche.runtime.data.epoch_course import EpochCourse
from elche.runtime.data.seeds import seed_process
from elche.runtime.epochs.epoch_execution import EpochExecution, EpochPart
from elche.runtime.epochs.epoch_opening import EpochOpening
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.runtime.process.worker import Worker
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.sync.resume_sync import rates
from elche.runtime.sync.sync_epoch import SyncEpoch
from elche.runtime.training import RunParts, Training, generators_of
from elche.runtime.watch.observer import LoopObserver
from elche.runtime.windows.synchroniser import Synchroniser


class RunEpochs:
    """Opens epochs with all ranks, and yields this rank's part of each.

    Attributes:
        opening: opens epochs with all ranks.
        execution: runs the current part of an epoch.
        reports: reports of finished epochs.
        samples_before: samples of finished epochs and parts, of all ranks.
        resumed_samples: samples of this epoch that were trained before a resume.
    """

    # One iteration of the loader, as `_run_epoch` goes through it:
    #
    #     _open_part ► execution.run ► _end_part ─ nothing is left ─► _end_epoch
    #         ▲                            │ cut: for a checkpoint, joins, deaths
    #         └────────── _pause ◄─────────┘ ─ the run ends ─► _end_epoch
    #
    # A loop that breaks off, or begins a new iteration meanwhile, ends the part on
    # all ranks; if that was cut before, its rest is opened once more (_leave_rest).

    def __init__(
        self,
        worker: Worker,
        training: Training,
        synchroniser: Synchroniser,
        notifications: RunNotifications,
        observer: LoopObserver,
    ) -> None:
        self._worker = worker
        self._training = training
        self._synchroniser = synchroniser
        self._notifications = notifications
        self._observer = observer
        self._course: EpochCourse | None = None
        self._resumed: EpochCourse | None = None
        self._is_cut = self._is_resumed = self._is_closed = False
        self._iteration: weakref.ref[Generator[Any, None, None]] | None = None
        self._iterations = 0
        self.opening = EpochOpening(
            worker, training, synchroniser, observer, notifications
        )
        self.execution = EpochExecution(training, observer, self.opening)
        if worker.survives:
            worker.on_regroup = self.execution.regroup
        self.reports: list[EndEpoch] = []
        self.samples_before = self.resumed_samples = 0
        self._cut: tuple[int, ...] = ()
        self._ended: EndEpoch | None = None  # and the ranks' models are not compared

    @property
    def under_way(self) -> SyncEpoch | WindowEpoch | None:
        """Executor of the current part; None outside epochs."""
        return self.execution.under_way

    @property
    def has_open_batches(self) -> bool:
        """True while batches of the loader wait for their backward pass."""
        return bool(self._observer.graphs.open_batches)

    @property
    def progress_samples(self) -> float:
        """Samples of all ranks so far: the same function of progress on each rank."""
        if isinstance(self.under_way, WindowEpoch):
            return self.under_way.progress_samples
        done = self.under_way.samples_done if self.under_way is not None else 0
        return float(self.samples_before + done)

    @property
    def progress_steps(self) -> float:
        """Steps of the run so far: the same function of progress on each rank."""
        course = self._course
        before = self.samples_before if course is None else course.samples_before
        return self._observer.steps.at(self.progress_samples - before)

    @property
    def samples_kept(self) -> int:
        """Samples in the model before this part, without those of open batches."""
        course = self._course
        return self.samples_before - (0 if course is None else course.open_samples)

    def state_dict(self) -> dict[str, Any]:
        """Number of the next epoch, or the remainder of one that is cut."""
        course, samples = self._course, self.samples_before
        return {
            "next": self.opening.epoch + (course is None),
            "course": None if course is None else course.state_dict(samples),
            "schedules": self._observer.schedulers.state_dict(),
            "copies": self._observer.copies.state_dict(),
        }

    def parts(self, state: dict[str, Any]) -> RunParts:
        """Parts of a checkpoint beside this state of the run."""
        windows = self._synchroniser.windows
        return RunParts(
            model=self._training.model,
            optimizers=self._observer.optimizers(),
            copies=self._training.copies,
            generators={
                "feed": self.execution.generator,
                **generators_of(self._training.loader),
            },
            is_common=windows is None or windows.is_common_step,
            state=state,
            epochs=self.state_dict(),
        )

    def load_state_dict(self, state: dict[str, Any], counted: int = 0) -> None:
        """Restores :meth:`state_dict`, before the first epoch.

        Args:
            state: state of this run, or of another rank that this one joins.
            counted: `samples_before` of that rank.

        Raises:
            ConfigError: an epoch has begun.
        """
        if self.opening.epoch >= 0:
            raise ConfigError(
                "expected elche.resume() before the first epoch, got it after "
                f"{self.opening.epoch + 1}; call it right after elche.setup"
            )
        course = state["course"]
        self._resumed = None if course is None else EpochCourse.from_state(course)
        self.samples_before = counted
        if self._resumed is not None:
            self._resumed.samples_before += counted
        self.opening.epoch = state["next"] - 1
        self._is_resumed = True
        self._observer.schedulers.load_state_dict(state["schedules"])
        self._observer.copies.load_state_dict(state["copies"])

    def joining_state(self) -> dict[str, Any]:
        """State for ranks that join, beside a checkpoint's contents.

        Raises:
            ConfigError: the loop has state that cannot be copied.
        """
        policy = self._training.config.policy
        if policy in ("sync", "auto"):  # in whose steps ranks may meet
            is_late = self.has_open_batches  # their next pass is of a step before
            why = EARLY if is_late else self._observer.barred()
            if why:
                raise ConfigError(f"no rank can join under policy {policy!r}: {why}")
        return {
            "counted": self.samples_before,
            "trained": self._synchroniser.digest(),
            "policy": self._synchroniser.policy,
        }

    def adopt_state(self, state: dict[str, Any], info: Mapping[str, Any]) -> None:
        """Adopts another rank's position, from its `joining_state`.

        Raises:
            MismatchError: this rank trains other parameters.
        """
        if info["trained"] != self._synchroniser.digest():
            raise MismatchError(
                "a joining rank would train other parameters than the run, whose "
                "ranks froze, unfroze or added some since the start"
            )
        self._synchroniser.build_alone(info["policy"])
        self.load_state_dict(state, info["counted"])

    def attach(self) -> None:
        """Builds the reducers, and seeds this rank."""
        self._synchroniser.build()
        self._observer.attach(self._synchroniser)
        self.opening.probe()
        seed = self._training.config.seed
        seed_process(seed, self._worker.rank, self.execution.generator)

    def iterate(self, steps: int = -1) -> Iterator[Any]:
        """Opens the next epoch on all ranks and yields this rank's batches.

        Args:
            steps: most steps of the epoch; -1 for all of it.

        Raises:
            CommunicationError: the run has ended.
        """
        if self._is_closed:
            raise CommunicationError("this run has ended; call elche.setup again")
        if self._worker.is_new:
            raise ConfigError(
                "a joining rank starts at the run's current epoch: write `for epoch "
                "in elche.epochs(number):` around the loop over the loader"
            )
        self.end_iteration()
        self.execution.check()
        if self.opening.steps.late_error is not None:
            raise self.opening.steps.late_error
        iteration = self._run_epoch(steps)
        self._iteration = weakref.ref(iteration)
        self._iterations += 1
        return self._alone(iteration, self._iterations)

    def _alone(self, iteration: Iterator[Any], number: int) -> Iterator[Any]:
        """Yields an iterator's batches; an error if a later iterator has ended it."""
        yield from iteration
        if number != self._iterations:
            raise ConfigError(
                "the loader is iterated twice at the same time, as in zip(loader, "
                "loader), and a new iteration ends the one before: iterate over it "
                "once, and over a plain DataLoader for a second batch"
            )

    def left_how(self, last_event: Event) -> Event:
        """Returns `Left` with the run's progress under windows, else ``last_event``."""
        steps = self._observer.steps
        if not steps.has_left or self._synchroniser.windows is None:
            return last_event
        return Left(
            rank=self._worker.rank,
            batches=steps.taken,
            samples=self.samples_before,
            steps=steps.before,
        )

    def close(self) -> None:
        """Ends the iteration of epochs; one in progress is abandoned."""
        self._is_closed = True
        self._observer.detach()
        self.execution.close()

    def end_iteration(self) -> None:
        """Ends an epoch that the loop has left while it still holds the iterator."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None:
            iteration.close()
        self._iteration = None

    def _run_epoch(self, steps: int) -> Generator[Any, None, None]:
        if not self._training.pauses.begin_pass():
            return
        self._course, self._resumed = self._resumed, None
        is_new = True
        try:
            while is_new or self._is_cut:
                self.execution.begin(self._open_part(steps, is_new=is_new))
                is_new = False
                try:
                    yield from self.execution.run()
                finally:
                    if not self._is_closed:
                        self._end_part()
                self._compare()
                if self._is_cut and self._pause():
                    return
        except GeneratorExit:
            self._compare()
            if self._is_cut and not self._is_closed:
                self._leave_rest(steps)
            raise
        finally:
            if not self._is_closed:
                self._course = None

    def _compare(self) -> None:
        """Compares the whole model between all ranks, after a part has ended.

        Skipped if a rank's loop has left early: it may have raised.
        """
        end, self._ended = self._ended, None
        worker = self._worker
        was_left = end is not None and end.is_early and not end.left
        if end is None or was_left or worker.is_closed or len(worker.members) == 1:
            return
        worker.regroup_if_due()
        name, checks = f"the end of epoch {end.epoch}", self.execution.sums.whole()
        worker.send(BarrierReached(rank=worker.rank, name=name, checks=checks))
        worker.expect(BarrierPassed, f"all ranks at {name}")

    def _pause(self) -> bool:
        """Handles a cut of the epoch; returns True if it ends here on all ranks."""
        assert self._course is not None
        end = self._course.ends[-1]
        if end.is_early or not self.opening.steps.lost.is_settled:
            self._training.pauses.cut(is_end=end.is_early)
        if end.is_early:
            self._end_epoch(end)
        return end.is_early

    def _leave_rest(self, steps: int) -> None:
        """Ends the rest of a cut epoch that the loop has left."""
        if self._pause():
            return
        part = self.execution.begin(self._open_part(steps))
        part.leave()
        self._end_part()

    def _end_part(self) -> None:
        """Ends the part, and the epoch with it unless the epoch was cut."""
        course, run = self._course, self.execution.end()
        assert course is not None
        if run.end is not None:
            self.samples_before += run.end.samples
            course.ended(run.end, run.open_batch if isinstance(run, SyncEpoch) else ())
            self._is_cut, self._ended = not course.is_over, run.end
        if not self._is_cut:
            self._end_epoch(run.end)

    def _end_epoch(self, end: EndEpoch | None) -> None:
        """Ends the epoch after its last part, unless the loop left it."""
        course = self._course
        if end is not None and course is not None:
            samples = self.samples_before - course.samples_before
            self._observer.steps.end_epoch(samples, is_early=end.is_early)
            self.reports.append(whole_end(course.ends))
        self._observer.schedulers.end_epoch(has_ended=end is not None)

    def _open_part(self, steps: int, *, is_new: bool = False) -> EpochPart:
        """Opens the epoch, or the rest of it, with all ranks."""
        self._worker.regroup_if_due()
        course, opening = self._course, self.opening
        most = steps if steps >= 0 else None
        if is_new:
            self._notifications.scalars.clear()  # of an epoch that was left early
            opening.epoch = self.opening.epoch + 1 if course is None else course.number
        if course is None:
            opening.order.begin(self.opening.epoch, most)
        changed = self._synchroniser.is_changed
        begin = opening.open(
            self._opened(steps, is_changed=changed),
            None if course is None else course.part_sizes,
        )
        self._is_cut = self._is_resumed = False
        self._log_batch_cut(begin)
        self.execution.prepare(begin, is_changed=changed, wants_keys=course is None)
        if course is None:
            sizes = BatchSizes(begin.sizes)
            shared = opening.share(sizes)
            whole = PartRanges(((0, sizes.num_samples),))
            course = EpochCourse(
                self.opening.epoch, shared, sizes, whole, self.samples_before, most
            )
        self._course = course
        if is_new:
            self._begin_count(course)
        else:
            self._observer.schedulers.begin_part()
        positions = course.positions(self._training.config.seed)
        return EpochPart(
            positions.cut_by(BatchCut(*begin.cut)),
            begin.window,
            course.sizes,
            is_first=is_new,
            is_by_steps=most is not None,
        )

    def _log_batch_cut(self, begin: BeginEpoch) -> None:
        """Emits a changed size of local batches, on the first rank."""
        size = self._training.loader.batch_size
        if begin.policy == "sync" or size is None:
            return
        before, self._cut = self._cut, begin.cut
        if before not in ((), begin.cut) and not self._worker.place:
            samples = BatchCut(*begin.cut).largest_of(size)
            line = f"elche: local batches of {samples} samples (batch_size {size})"
            self._notifications.emit(line)

    def _opened(self, steps: int, *, is_changed: bool) -> EpochOpened:
        """Message of this rank about the epoch that it opens."""
        observer, rank = self._observer, self._worker.rank
        followed = observer.schedulers.optimizers
        return EpochOpened(
            rank=rank,
            epoch=self.opening.epoch,
            layout=self._synchroniser.layout(),
            checks=() if is_changed else self.execution.sums.whole(),
            rates=rates(observer.optimizers(), rank, followed),
            steps=steps,
            continues=self._course is not None or self._is_resumed,
            backend=getattr(self._worker.group.devices, "backend", ""),
        )

    def _begin_count(self, course: EpochCourse) -> None:
        """Starts counting steps, which schedulers follow."""
        observer = self._observer
        observer.steps.begin_epoch(course.sizes)
        before = course.samples_before
        done = self.resumed_samples = self.samples_before - before
        observer.schedulers.begin_epoch(before, observer.optimizers(), done)
