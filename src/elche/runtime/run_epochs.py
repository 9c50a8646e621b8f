"""The epochs of a run, one after another, as one rank goes through them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from elche.cadence.throughput import CostEstimate
from elche.comm.model_buffers.known_buffers import shared_tensors
from elche.comm.tensors.equal_tensors import make_equal
from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes
from elche.coordination.accounts.epoch_parts import PartRanges, whole_end
from elche.coordination.accounts.step_count import StepCount
from elche.coordination.agreement import round_differently
from elche.coordination.protocol.events import (
    EpochCut,
    EpochOpened,
    Failed,
)
from elche.coordination.protocol.instructions import (
    BeginEpoch,
    EndEpoch,
)
from elche.coordination.protocol.messages import Scalars
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.coordination.sync.step_reports import EARLY
from elche.coordination.windows.window_loop import WindowLoop
from elche.errors import (
    CommunicationError,
    ConfigError,
    ElcheError,
    NonFiniteError,
)
from elche.runtime.data.epoch_course import EpochCourse
from elche.runtime.data.leased_batches import LeasedBatches
from elche.runtime.data.positions import EpochPositions
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.data.seeding import rank_seed, seed_rank, separate_rank
from elche.runtime.epoch_opening import EpochOpening
from elche.runtime.plan_file import PlanFile
from elche.runtime.process.shutdown import exit_watch
from elche.runtime.process.worker import Worker
from elche.runtime.rank_settings import checksum, min_share_samples
from elche.runtime.report.notifications import RunNotifications, with_samples
from elche.runtime.resume_sync import broadcast_from, rates
from elche.runtime.step_members import StepMembers
from elche.runtime.sync_epoch import TOO_EARLY, SyncEpoch, open_step
from elche.runtime.training import RunParts, Training, generators_of
from elche.runtime.watch.batch_state import BatchStateWatch
from elche.runtime.watch.followed_schedulers import FollowedSchedulers, mean_of
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.loss_reduction import SumLossWatch
from elche.runtime.watch.optimizers_seen import OptimizersSeen
from elche.runtime.watch.scaler_skips import ScalerSkips
from elche.runtime.watch.trailing_step import TrailingSteps
from elche.runtime.window_epoch import EpochHooks, WindowEpoch
from elche.runtime.windows.gradient_sync import refuse_stray_gradients
from elche.runtime.windows.model_copies import ModelCopies
from elche.runtime.windows.regrouping import Regrouping
from elche.runtime.windows.step_regrouping import StepRegrouping
from elche.runtime.windows.synchroniser import Synchroniser
from elche.torch_internals.passes import is_compiled

logger = logging.getLogger(__name__)

STEPS_WITHOUT_BACKWARD = 3
"""Steps of ``sync`` without a backward pass after which no skipping is assumed."""


@dataclass(frozen=True, slots=True)
class RankWatch:
    """What is seen of how a rank trains.

    Attributes:
        skips: steps that a GradScaler skips.
        optimizers: which step the model.
        devices: device names of all ranks.
        copies: of the model, that the loop keeps.
    """

    skips: ScalerSkips
    optimizers: OptimizersSeen
    devices: tuple[str, ...]
    copies: ModelCopies


class RunEpochs:
    """Opens epochs with all ranks, and hands out this rank's part of each.

    Args:
        worker: this rank's shell, its group formed.
        training: what is trained.
        synchroniser: brings it together with the other ranks.
        notifications: receives the metrics of epochs.
        plans: what is recorded or replayed.
        watch: what is seen of this rank's loop, and the devices.

    Attributes:
        members: who takes part in steps.
        schedulers: those that were handed over.
        under_way: the epoch that the loop is in.
        reports: of epochs that have ended.
        steps: of the run.
        samples_before: samples of the epochs that have ended, of all ranks.
        last_samples: of the batch that the last epoch ended with, under ``sync``.
    """

    def __init__(
        self,
        worker: Worker,
        training: Training,
        synchroniser: Synchroniser,
        notifications: RunNotifications,
        plans: PlanFile,
        watch: RankWatch,
    ) -> None:
        self._worker = worker
        self._training = training
        self._synchroniser = synchroniser
        self._notifications = notifications
        self._plans = plans
        devices = watch.devices
        self._is_mixed = round_differently(devices)
        self._batches: LeasedBatches | None = None
        self._generator = torch.Generator()
        self._batch_cost = CostEstimate()
        self._course: EpochCourse | None = None
        self._resumed: EpochCourse | None = None
        self._is_new = self._is_cut = self._is_resumed = self._is_asked = False
        self._is_by_steps = False
        self._iteration: weakref.ref[Generator[Any, None, None]] | None = None
        self._steps_without_backward = 0
        self._pending_error: ElcheError | None = None
        self._trailing = TrailingSteps(training.model)
        self._graphs = LiveGraph(training.model)
        self._skips, self._optimizers = watch.skips, watch.optimizers
        self._copies = watch.copies
        self._lag_steps = int(training.delayed is not None)
        self._numbers = NonFiniteRecord(self._lag_steps)
        self._sum_loss: SumLossWatch | None = None
        self._is_closed = False
        self.under_way: SyncEpoch | WindowEpoch | None = None
        self.reports: list[EndEpoch] = []
        self.steps = StepCount()
        self.schedulers = FollowedSchedulers(
            training.config.policy,
            partial(_mean_of, worker),
            self.steps,
        )
        is_mortal = bool(training.config.mortal_by)
        generators = [*generators_of(training.loader).values()]
        self._order = SampleOrder(training.loader, generators, hands_on=not is_mortal)
        self._regrouping = Regrouping(
            worker,
            synchroniser,
            self._order,
            training.pauses.hand_over,
            lambda line: notifications.emit(line),
            min_ranks=training.config.min_ranks,
        )
        self._batch_state = BatchStateWatch(
            training.model, watch.optimizers, watch.skips, self._copies, self.schedulers
        )
        self.members = StepMembers(
            worker,
            training,
            synchroniser,
            watch.optimizers,
            self._batch_state,
            notifications,
        )
        self._step_regrouping = StepRegrouping(
            worker, synchroniser, self._regrouping, self.members
        )
        self._opening = EpochOpening(
            worker,
            synchroniser,
            self._order,
            self._regrouping,
            self._step_regrouping,
            probes=training.config.policy == "auto",
        )
        if not is_mortal:
            worker.on_regroup = self._regroup_between
        self.samples_before = self.last_samples = 0

    @property
    def _epoch(self) -> int:
        """The epoch that was opened last; -1 before the first."""
        return self._opening.epoch

    @property
    def progress_samples(self) -> float:
        """Samples of all ranks since the run began, the same function on each."""
        if isinstance(self.under_way, WindowEpoch):
            return self.under_way.progress_samples
        done = self.under_way.samples_done if self.under_way is not None else 0
        return float(self.samples_before + done)

    @property
    def epoch_samples(self) -> float:
        """Samples of the epoch under way that are trained, in all its parts."""
        course = self._course
        before = self.samples_before if course is None else course.samples_before
        return self.progress_samples - before

    @property
    def samples_kept(self) -> int:
        """Those before this part that the model has: not of an `open_batch`."""
        course = self._course
        return self.samples_before - (0 if course is None else course.open_samples)

    def state_dict(self) -> dict[str, Any]:
        """Which epoch comes next, or what is left of one that is cut."""
        course, samples = self._course, self.samples_before
        return {
            "next": self._epoch + (course is None),
            "course": None if course is None else course.state_dict(samples),
            "schedules": self.schedulers.state_dict(),
            "copies": self._copies.state_dict(),
        }

    def parts(self, state: dict[str, Any]) -> RunParts:
        """What a checkpoint is made of beside this state of the run."""
        windows = self._synchroniser.windows
        return RunParts(
            model=self._training.model,
            optimizers=self._optimizers.all(),
            copies=self._training.copies,
            generators={
                "feed": self._generator,
                **generators_of(self._training.loader),
            },
            is_common=windows is None or windows.is_common_step,
            state=state,
            epochs=self.state_dict(),
        )

    def load_state_dict(self, state: dict[str, Any], counted: int = 0) -> None:
        """Goes on from :meth:`state_dict`, before the first epoch.

        Args:
            state: of this run before, or of another rank that this one joins.
            counted: samples of all ranks that are in `samples_before` there.

        Raises:
            ConfigError: one has begun.
        """
        if self._epoch >= 0:
            raise ConfigError(
                "expected elche.resume() before the first epoch, got it after "
                f"{self._epoch + 1}; call it right after elche.setup"
            )
        course = state["course"]
        self._resumed = None if course is None else EpochCourse.from_state(course)
        self.samples_before = counted
        if self._resumed is not None:
            self._resumed.rebase(counted)
        self._opening.go_to(state["next"] - 1)
        self._is_resumed = True
        self.schedulers.load_state_dict(state["schedules"])
        self._copies.load_state_dict(state["copies"])

    def share_generators(self) -> None:
        """Tells all ranks where the first one's generators stand."""
        self._order.share_generators(self._worker.group)

    def join(self) -> None:
        """Waits for the others to pause, forms the next group, and takes over."""
        self._opening.join()

    def check_hand_over(self) -> None:
        """Refuses ranks that would not take this one's steps.

        Raises:
            ConfigError: the loop does something that cannot be handed over.
        """
        policy = self._training.config.policy
        if policy not in ("sync", "auto"):  # whose windows steps may follow
            return
        is_late = self._graphs.is_live  # the others' next pass is of a step before
        why = EARLY if is_late else self._batch_state.barred()
        if why:
            raise ConfigError(f"none can join steps under policy {policy!r}: {why}")

    def attach(self) -> None:
        """Builds what the run needs, and gives this rank its own randomness."""
        config, loader = self._training.config, self._training.loader
        self._skips.attach()
        self._synchroniser.build()
        self._optimizers.attach()
        if config.policy != "sync":
            self._copies.attach()
        self._opening.probe()
        rank = self._worker.rank
        if config.seed is None:
            separate_rank(rank)
        else:
            seed_rank(config.seed, rank)
        generator = self._generator
        generator.manual_seed(rank_seed(torch.initial_seed(), rank))
        self._batches = LeasedBatches(
            loader,
            generator,
            self._worker.placement.device,
            self._refill,
            self._training.weights,
        )

    def check(self) -> None:
        """Raises what went wrong where nothing could be raised."""
        if self._pending_error is not None:
            error, self._pending_error = self._pending_error, None
            raise error

    def iterate(self, steps: int = -1) -> Iterator[Any]:
        """Opens the next epoch on all ranks and hands out this rank's part.

        Args:
            steps: of the epoch at most; -1 for all of it.

        Raises:
            CommunicationError: the run has ended.
        """
        if self._is_closed:
            raise CommunicationError("this run has ended; call elche.setup again")
        if self._worker.is_new:
            raise ConfigError(
                "a rank joins a run where that stands in its epochs: write `for epoch "
                "in elche.epochs(number):` around the loop over the loader"
            )
        self.end_iteration()
        self.check()
        if self.members.late_error is not None:
            raise self.members.late_error
        iteration = self._run_epoch(steps)
        self._iteration = weakref.ref(iteration)
        return iteration

    def close(self) -> None:
        """No other epoch follows, and one under way is left as it is."""
        self._is_closed = True
        self._trailing.forget()
        self._graphs.forget()
        if self._sum_loss is not None:
            self._sum_loss.detach()
        self._skips.detach()
        self._optimizers.detach()
        self.schedulers.detach()
        self._copies.detach()
        self._batches = None

    def end_iteration(self) -> None:
        """Ends an epoch that the loop has left but still holds an iterator of."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None:
            iteration.close()
        self._iteration = None

    def _refill(self) -> None:
        if self.under_way is not None:
            self.under_way.refill()

    def _run_epoch(self, steps: int) -> Generator[Any, None, None]:
        if not self._training.pauses.begin_pass():
            return
        self._course, self._resumed = self._resumed, None
        self._is_new = True
        try:
            while self._is_new or self._is_cut:
                yield from self._run_part(steps)
                if self._is_cut and self._pause():
                    return
        except GeneratorExit:
            if self._is_cut and not self._is_closed:
                self._leave_rest(steps)
            raise
        finally:
            if not self._is_closed:
                self._course = None

    def _pause(self) -> bool:
        """The epoch is cut; whether it ends here on all ranks."""
        assert self._course is not None
        end = self._course.ends[-1]
        if end.is_early or not self._step_regrouping.lost.is_settled:
            self._training.pauses.cut(is_end=end.is_early)
        if end.is_early:
            self._end_epoch(end)
        return end.is_early

    def _leave_rest(self, steps: int) -> None:
        """The loop has left an epoch that was cut meanwhile, and goes on elsewhere."""
        if self._pause():
            return
        positions, window = self._open_part(steps)
        assert self._batches is not None
        self._batches.start(positions)
        run = self.under_way = self._epoch_run(positions, window)
        run.leave()
        self._end_part(run)

    def _run_part(self, steps: int) -> Generator[Any, None, None]:
        self._trailing.forget()
        positions, window = self._open_part(steps)
        batches = self._batches
        assert batches is not None
        batches.start(positions)
        self._worker.name_samples = partial(with_samples, positions=positions)
        run = self._epoch_run(positions, window)
        self.under_way = run
        if self._sum_loss is None:
            self._watch_loss()
        try:
            yield from self._batches_of(run)
            if isinstance(run, SyncEpoch) and run.switch is not None:
                run = self.under_way = self._switched(run, positions)
                yield from self._batches_of(run)
        except GeneratorExit:
            self.steps.has_left = True
            if isinstance(run, SyncEpoch) and run.switch is not None and not run.end:
                run = self.under_way = self._switched(run, positions)
                run.leave(is_known=True)
            raise
        except NonFiniteError as error:
            self._pending_error = named = self._worker.name_samples(error)
            raise named from None
        except Exception as error:
            self._pending_error = CommunicationError(
                f"epoch {self._epoch} was broken off on rank {self._worker.rank} by "
                f"{error!r}, which the loop caught; other ranks wait for what this "
                "one was given, so the run cannot go on"
            )
            raise
        finally:
            if not self._is_closed:
                self._end_part(run)

    def _end_part(self, run: SyncEpoch | WindowEpoch) -> None:
        """The epoch has ended, or was cut, or broken off."""
        course, end = self._course, run.end
        assert self._batches is not None
        assert course is not None
        self._batches.finish()
        self.under_way = None
        self._copies.is_in_steps = False
        self.last_samples = run.samples_in_hand
        if isinstance(run, WindowEpoch):
            self._trailing.watch(self._synchroniser.policy)
        if end is not None:
            self.samples_before += sum(end.samples)
            course.ended(end, run.open_batch if isinstance(run, SyncEpoch) else ())
            self._is_cut = not course.is_over
        if not self._is_cut:
            self._end_epoch(end)

    def _end_epoch(self, end: EndEpoch | None) -> None:
        """What there is to do after the last part, unless it was broken off."""
        course = self._course
        if end is not None and course is not None:
            samples = self.samples_before - course.samples_before
            self.steps.end_epoch(samples, is_early=end.is_early)
            self.reports.append(whole_end(course.ends))
        self.schedulers.end_epoch(has_ended=end is not None)
        self._plans.keep("" if end is None else end.plan)

    def _watch_loss(self) -> None:
        """Refuses a loss that is a sum: of a part of the batch it is another one."""
        if self._training.config.loss_reduction == "mean":
            parameters = self._synchroniser.parameters
            self._sum_loss = SumLossWatch([p for p in parameters if p.requires_grad])

    def _batches_of(self, run: SyncEpoch | WindowEpoch) -> Iterator[Any]:
        if isinstance(run, WindowEpoch):
            self._synchroniser.refuse_nan(self._epoch)
        with contextlib.closing(run.batches()) as batches:
            for batch in batches:
                exit_watch.forget()
                self.steps.taken += 1
                try:
                    yield batch
                except GeneratorExit:
                    self._end_by_exit()
                    raise
                self.schedulers.batch_done()
                self._skips.settle()
                self._ask_for_cut()

    def _ask_for_cut(self) -> None:
        """The first rank has it cut where a checkpoint is wanted, any at an end."""
        worker, pauses = self._worker, self._training.pauses
        if self._is_asked or not (
            pauses.wants_end() if worker.place else pauses.wants_cut()
        ):
            return
        self._is_asked = True
        cut = EpochCut(rank=worker.rank, epoch=self._epoch, is_end=pauses.wants_end())
        worker.send(cut)

    def _end_by_exit(self) -> None:
        """Ends the run on all ranks if the loop was left by ``sys.exit``: no break."""
        code = exit_watch.code
        if code is not None:
            rank, said = self._worker.rank, f"sys.exit({code}) inside the loop"
            ended = Failed(rank=rank, error=said, traceback="", exit_code=code)
            self._worker.close(ended)

    def _open_part(self, steps: int) -> tuple[EpochPositions, int]:
        """Agrees on the epoch, or what is left of it; also its first window."""
        self._skips.settle()
        self._worker.regroup_if_told()
        course, is_new = self._course, self._is_new
        worker, model = self._worker, self._training.model
        most = steps if steps >= 0 else None
        if is_new:
            self._notifications.scalars.clear()  # of an epoch that was left early
            self._opening.go_to(self._epoch + 1 if course is None else course.number)
            self._is_by_steps = steps >= 0
        if course is None:
            self._order.begin(self._epoch, most)
        changed = self._synchroniser.is_changed
        opened = EpochOpened(
            rank=worker.rank,
            epoch=self._epoch,
            layout=self._synchroniser.layout(),
            checksum="" if changed or self._is_mixed else checksum(model),
            plan=self._plans.epoch(self._epoch),
            rates=rates(
                self._optimizers.all(), worker.rank, self.schedulers.optimizers
            ),
            steps=steps,
            continues=course is not None or self._is_resumed,
        )
        sizes = None if course is None else course.part_sizes
        begin = self._opening.open(opened, sizes)
        self._is_new = self._is_cut = self._is_resumed = self._is_asked = False
        self._prepare(begin, is_changed=changed, wants_keys=course is None)
        if course is None:
            sizes = BatchSizes(begin.sizes)
            shared = self._opening.share(sizes)
            whole = PartRanges(((0, sizes.num_samples),))
            course = EpochCourse(
                self._epoch, shared, sizes, whole, self.samples_before, most
            )
        self._course = course
        if is_new:
            self.steps.begin_epoch(course.sizes)
            before = course.samples_before
            done = self.samples_before - before
            self.schedulers.begin_epoch(before, self._optimizers.all(), done)
        else:
            self._numbers = NonFiniteRecord(self._lag_steps)  # it names steps of a part
            self.schedulers.begin_part()
        positions = course.positions(self._training.config.seed)
        return positions.cut_by(BatchCut(*begin.cut)), begin.window

    def _regroup_between(self) -> None:
        """Ranks have died, or are to join, outside of windows."""
        if isinstance(self.under_way, SyncEpoch):
            self.under_way.regroup()
        else:
            self._opening.regroup()
            reducer = self._synchroniser.reducer
            has_lost = reducer is not None and self._step_regrouping.has_lost
            if reducer and has_lost and open_step(reducer, self._graphs):
                raise CommunicationError(TOO_EARLY)

    def _prepare(
        self, begin: BeginEpoch, *, is_changed: bool, wants_keys: bool
    ) -> None:
        """Builds what this epoch's policy needs, and takes over who trained alone."""
        is_other = begin.policy != self._synchroniser.policy
        is_apart, self._step_regrouping.is_apart = self._step_regrouping.is_apart, False
        if not (is_changed or is_other):
            if is_apart:
                self._synchroniser.share_again()
                self.members.reset()
            return
        if is_other:
            self._graphs.moved(begin.policy)
        build = partial(self._build, begin, is_changed=is_changed)
        self._opening.build(begin.policy, build, wants_keys=wants_keys)
        self.members.reset()
        self._numbers = NonFiniteRecord(self._lag_steps)  # it counts what is trained

    def _build(self, begin: BeginEpoch, *, is_changed: bool) -> None:
        """With all ranks of the group that there is, perhaps again in another one.

        Raises:
            CommunicationError: the rank that trained alone has died.
        """
        group, model, source = (
            self._worker.group,
            self._training.model,
            begin.state_from,
        )
        if is_changed:
            named = shared_tensors(model, group)
            make_equal(group, named, "sharing a changed model")
        self._synchroniser.build(begin.policy)
        if source is None:
            return
        if source not in group.ranks:
            raise CommunicationError(
                f"rank {source}, which trained alone, has died before the others had "
                "its optimizer's state: start the run anew from its last checkpoint"
            )
        place = list(group.ranks).index(source)
        broadcast_from(group, model, self._optimizers.all(), place)

    def _epoch_run(
        self, positions: EpochPositions, window: int
    ) -> SyncEpoch | WindowEpoch:
        reducer, batches = self._synchroniser.reducer, self._batches
        assert batches is not None
        self._steps_without_backward = 0
        batches.marks_dynamic = reducer is not None and self._varies
        is_counted = self._training.epochs is not None or self._is_by_steps
        is_counted &= self._training.config.leave_out
        self._batch_state.begin_epoch(is_counted=is_counted)
        if reducer is not None:
            self._copies.is_in_steps = True
            return SyncEpoch(
                self._worker,
                batches,
                positions,
                reducer,
                min_share_samples(self._training.model),
                self._hooks(positions),
            )
        return self._window_epoch(positions, window)

    @property
    def _varies(self) -> bool:
        """Whether a compiled model gets shares of several sizes."""
        config, modules = self._training.config, self._training.model.modules()
        is_fixed = config.debug.deterministic or config.shares == "fixed"
        return not is_fixed and any(map(is_compiled, modules))

    def _switched(self, before: SyncEpoch, positions: EpochPositions) -> WindowEpoch:
        """Windows take over what is left of the epoch, in batches of their own."""
        assert before.switch is not None
        assert self._course is not None
        step, whole = before.switch.step, positions.sizes
        positions = positions.cut_by(BatchCut(*before.switch.cut))
        self._worker.name_samples = partial(with_samples, positions=positions)
        self._graphs.moved(before.switch.policy)
        policy = before.switch.policy
        self._opening.build(policy, partial(self._synchroniser.build, policy))
        epoch = self._window_epoch(positions, before.switch.window)
        left = whole.samples_in(step, whole.num_batches)  # a tail is a step, too
        sizes = self._course.sizes
        done = sizes.batches_in(sizes.num_samples - left)  # in earlier parts as well
        self._copies.begin_epoch(round(self.steps.of_epoch - done), left)
        for instruction in before.later:
            epoch.handle(instruction)
        return epoch

    def _window_epoch(self, positions: EpochPositions, window: int) -> WindowEpoch:
        sync = self._synchroniser.windows
        assert sync is not None
        batches = self._batches
        assert batches is not None
        sync.rebase()
        self.schedulers.begin_windows()
        assert self._course is not None
        num_samples = self._course.sizes.num_samples
        self._copies.begin_epoch(self.steps.of_epoch, num_samples)
        loop = WindowLoop(
            self._batch_cost, overlapped=sync.is_overlapped, reduced=window - 1
        )
        hooks = self._hooks(positions)
        return WindowEpoch(self._worker, batches, positions, sync, loop, hooks)

    def _hooks(self, positions: EpochPositions) -> EpochHooks:
        return EpochHooks(
            partial(self._keep_error, positions),
            self._check_training,
            self._drain_scalars,
            self._synchroniser.parameter_norm,
            self._graphs,
            self._numbers,
            partial(self.members.adopt, epoch=self._epoch),
            self.schedulers,
            self._copies,
            self.members.leave_out,
            self.members.unknown,
            self._checksum,
            self._drain_step,
            self._regrouping,
            self._step_regrouping,
        )

    def _drain_step(self) -> None:
        if self._training.delayed is not None:
            self._training.delayed.drain()

    def _checksum(self) -> str:
        """Equal where ranks left an epoch with equal parameters."""
        if self._is_mixed:
            return f"of rank {self._worker.rank}"
        return checksum(self._training.model)

    def _drain_scalars(self, final: bool) -> Scalars:
        self._skips.settle()
        return self._notifications.scalars.drain(final=final)

    def _check_training(self) -> None:
        """Refuses what elche cannot see, or cannot follow, inside an epoch."""
        self._synchroniser.check()
        reducer = self._synchroniser.reducer
        self.schedulers.check(self._optimizers.all())
        if reducer is None:
            self._ask_for_cut()  # also of a rank that is given no batches
        elif reducer.backward_passes == 0:
            self._steps_without_backward += 1
            if self._steps_without_backward > STEPS_WITHOUT_BACKWARD:
                refuse_stray_gradients(self._synchroniser.parameters)
        else:
            self._batch_state.batch_done()

    def _keep_error(self, positions: EpochPositions, error: ElcheError) -> None:
        if isinstance(error, NonFiniteError):
            error = with_samples(error, positions)
        self._pending_error = error


def _mean_of(worker: Worker, metric: float) -> float:
    """A scheduler's metric, the same on all ranks."""
    worker.regroup_if_told()
    return mean_of(worker.group, metric)
