"""One rank's side of a training run on several ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from elche.comm.averaging.averager_state import is_of_gradients
from elche.comm.averaging.window_sync import WindowSync, refuse_state
from elche.comm.gradients.reducer import GradientReducer
from elche.comm.model_buffers.known_buffers import shared_tensors
from elche.comm.tensors.equal_tensors import make_equal
from elche.coordination.accounts.local_batches import local_cut
from elche.coordination.protocol.events import CheckpointSaved, Event, Failed, Left
from elche.coordination.protocol.instructions import Welcome
from elche.errors import ConfigError
from elche.runtime.epochs.run_epochs import RunEpochs
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.runtime.memory_limits import check_caps
from elche.runtime.process.connect import connect
from elche.runtime.process.environment import Placement
from elche.runtime.process.shutdown import failure_of
from elche.runtime.process.worker import Worker
from elche.runtime.rank_settings import (
    describe,
    join_event,
    min_share_samples,
    state_tensors,
)
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.report.run_summary import RunFacts, headline
from elche.runtime.report.timeline import write_part
from elche.runtime.sync.sync_epoch import SyncEpoch
from elche.runtime.training import RunParts, Training
from elche.runtime.user_collectives import UserCollectives
from elche.runtime.watch.followed_schedulers import mean_of
from elche.runtime.watch.observer import LoopObserver
from elche.runtime.windows.synchroniser import Synchroniser

logger = logging.getLogger(__name__)
HELD = (
    "elche: the run ended inside an epoch whose iterator the script still held "
    "(next() on it, say): under policy {!r} each rank then holds its own model, not "
    "the common one; write `for batch in loader.steps(n):`"
)
UNSTEPPED = (
    "elche: rank %d took no optimizer step after the backward passes of its last %d "
    "batches: under policy %r it runs its own number of batches, so `i + 1 == "
    "len(loader)` may never hold; accumulate inside a batch, or choose policy 'sync'"
)


class Run:
    """A run on one rank; made by :meth:`start`.

    Args:
        worker: this rank's worker, with its group formed.
        training: objects to train, and the agreed settings.
        welcome: the coordinator's facts about all ranks.

    Attributes:
        epochs: epochs of the run on this rank.
        collectives: collectives that the user's script calls.
        iterates_loader: False: no batch comes from the user's own loader.
    """

    def __init__(
        self,
        worker: Worker,
        training: Training,
        welcome: Welcome,
    ) -> None:
        self.worker = worker
        worker.survives = welcome.survives
        self.config = training.config
        self.notifications = RunNotifications(worker.rank)
        worker.on_notification = self.notifications.handle
        self._devices = welcome.devices
        self._memory_bytes = welcome.memory_bytes
        self._training = training
        self._observer = observer = LoopObserver(
            training, self.notifications, partial(mean_of, worker)
        )
        self._synchroniser = Synchroniser(
            training.config,
            training.model,
            worker.group,
            worker.groups.side,
            optimizers=observer.optimizers,
            is_weighed=training.weights is not None,
            keeps_sums=welcome.survives and worker.group.devices is None,
        )
        self.epochs = RunEpochs(
            worker,
            training,
            self._synchroniser,
            self.notifications,
            observer,
        )
        self.collectives = UserCollectives(worker, training.config, self.epochs)
        self.iterates_loader = False
        self._samples_resumed = 0
        self._closed = False

    @staticmethod
    def start(placement: Placement, training: Training, epochs: int | None) -> Run:
        """Joins the run, and makes all replicas equal to rank 0's.

        Raises:
            MismatchError: ranks disagree.
            CommunicationError: the ranks did not connect in time.
        """
        config, model, loader = training.config, training.model, training.loader
        hints = config.speed_hints
        if hints is not None and len(hints) != placement.world_size:
            raise ConfigError(
                f"expected a speed hint per rank ({placement.world_size}), got "
                f"{len(hints)}"
            )
        check_caps(training, placement.world_size, min_share_samples(model))
        placement, channel = connect(placement, config.timeout_s)
        worker = Worker(placement, channel, config.timeout_s)
        run: Run | None = None
        try:
            settings = describe(training, epochs)
            worker.send(join_event(placement, settings, model, loader))
            welcome = worker.expect(Welcome, "all ranks to join")
            if placement.joins:
                worker.groups.stay_apart(config.transport.kind)
            else:
                worker.groups.form(welcome, config.transport.kind)
            states = [each for o in training.optimizers for each in state_tensors(o)]
            named = [
                *shared_tensors(model, worker.group),
                *((f"state {index}", s) for index, (_, s) in enumerate(states)),
            ]
            make_equal(worker.group, named, "the first broadcast")
            run = Run(worker, training, welcome)
            run.epochs.attach()
            worker.begin_beats()
        except BaseException as error:
            if run is not None:
                run._release()
            worker.close(failure_of(worker.rank, error))
            raise
        return run

    @property
    def policy(self) -> str:
        """The policy that runs now; under ``auto`` the one it has chosen."""
        return self._synchroniser.policy

    @property
    def progress_samples(self) -> float:
        """Samples of the run so far: the same function of progress on every rank."""
        self._observer.schedulers.rates.has_read_progress = True
        return self.samples_done

    @property
    def samples_done(self) -> float:
        """Same as `progress_samples`, for display only."""
        return self._samples_resumed + self.epochs.progress_samples

    @property
    def progress_steps(self) -> float:
        """Steps of the run so far: the same function of progress on every rank."""
        self._observer.schedulers.rates.has_read_progress = True
        return self.epochs.progress_steps

    def steps_left(self, steps: int) -> int:
        """Steps of the whole run that are still to be taken."""
        return self._observer.steps.left(steps)

    @property
    def was_left_early(self) -> bool:
        """True if any rank's loop has left the last epoch before its end."""
        reports = self.epochs.reports
        return bool(reports) and reports[-1].is_early

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's run between epochs, beside model and optimizer."""
        return {
            "samples": self._samples_resumed + self.epochs.samples_kept,
            "steps": self._observer.steps.before,
            "averaging": self._reduction.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, with all ranks.

        Raises:
            ConfigError: nothing is averaged in this run.
            MismatchError: a rank's state does not fit, or ranks' do not belong
                together.
        """
        windows, averaging = self._synchroniser.windows, state["averaging"]
        if windows is not None:
            if is_of_gradients(averaging):  # a codec's rounding, of a step under sync
                averaging = None
            # A rank that left the last epoch early is awaited there until it reports.
            self.collectives.barrier("load_state_dict")
            windows.load_state_dict(averaging)
        elif self.config.policy == "auto":
            if averaging is not None:
                logger.info("policy 'auto' begins as sync: averaging is not resumed")
        elif is_of_gradients(averaging):
            assert self._synchroniser.reducer is not None
            self.collectives.barrier("load_state_dict")
            self._synchroniser.reducer.load_state_dict(averaging)
        else:
            refuse_state(averaging)
        self._note_progress(state)

    def _note_progress(self, state: dict[str, Any]) -> None:
        self._samples_resumed = state["samples"] - self.epochs.samples_before
        self._observer.steps.before = state["steps"]

    @property
    def rank(self) -> int:
        """This rank's place among the living ranks: its own until one has died."""
        return self.worker.place

    @property
    def world_size(self) -> int:
        """Number of living ranks."""
        return len(self.worker.members)

    @property
    def timeout_s(self) -> float:
        """Deadline (s) of a wait for others."""
        return self.config.timeout_s

    def agree(self, make: Callable[[], str], what: str) -> str:
        """Returns rank 0's text on every rank; called by all of them."""
        return self.collectives.barrier(what, make)

    why_no_cut = ""

    def parts(self) -> RunParts:
        """Parts of a checkpoint, between epochs or at a cut of one."""
        return self.epochs.parts(self.state_dict())

    def described(self) -> dict[str, Any]:
        """Progress for a checkpoint's manifest."""
        return {
            "samples": self._samples_resumed + self.epochs.samples_kept,
            "steps": self.epochs.progress_steps,
            "policy": self._synchroniser.policy,
            "config": self.config.as_dict(),
        }

    def resume(self, state: dict[str, Any], epochs: dict[str, Any]) -> None:
        """Resumes from a checkpoint's state, with all ranks."""
        self.epochs.load_state_dict(epochs)
        self.epochs.opening.order.share_generators(self.worker.group)
        self.load_state_dict(state)

    def adopt_state(
        self, state: dict[str, Any], epochs: dict[str, Any], info: Mapping[str, Any]
    ) -> None:
        """Adopts the position in another rank's `joining_state`; not a collective."""
        self.epochs.adopt_state(epochs, info)
        if self._synchroniser.windows is not None:
            self._synchroniser.windows.load_state_dict(state["averaging"])
        self._note_progress(state)

    @property
    def is_in_epoch(self) -> bool:
        """True if the loop is inside an epoch."""
        return self.epochs.under_way is not None

    @property
    def meets_in_forward(self) -> bool:
        """True if forward passes have collectives, so that no rank can leave alone."""
        reducer = self._synchroniser.reducer
        if reducer is None or not isinstance(self.epochs.under_way, SyncEpoch):
            return False
        return self.worker.meets_in_forward or not reducer.is_joinable

    def hold(self, holds: bool) -> None:
        """Accumulates gradients for the last micro-batch while ``holds``."""
        self._reduction.hold(holds)

    def rewind(self) -> None:
        """Discards an interrupted pass; its batch is run again, untimed.

        Raises:
            CommunicationError: its gradients were reduced already.
        """
        self.worker.is_cold = True
        self._reduction.rewind()

    @property
    def _reduction(self) -> GradientReducer | WindowSync:
        held = self._synchroniser.windows or self._synchroniser.reducer
        assert held is not None
        return held

    @property
    def current_samples(self) -> int:
        """Samples of the current batch that count for this rank."""
        under_way = self.epochs.under_way
        return 0 if under_way is None else under_way.current_samples

    @property
    def current_weight(self) -> float:
        """Weight of the current batch in means: its samples, or ``weight_of``."""
        under_way = self.epochs.under_way
        return 0.0 if under_way is None else under_way.current_weight

    @property
    def last_samples(self) -> int:
        """Samples of the current batch, or of the last epoch's last one."""
        return self.current_samples or self.epochs.execution.last_samples

    def headline(self) -> str:
        """The line that names the devices and whether they differ."""
        facts, batch_size = self.facts(), self._training.loader.batch_size
        steps = ""
        if facts.policy in ("cadence", "async") and batch_size is not None:
            least = min_share_samples(self._training.model)
            cut = local_cut(self.config.windows, len(facts.devices), least)
            samples = cut.largest_of(batch_size)
            steps = f", steps of {samples} samples (batch_size {batch_size})"
        return headline(facts, self._synchroniser.trained_bytes, steps)

    def facts(self) -> RunFacts:
        """Facts of the run, for its summary."""
        codec = self.config.codec
        coded = "" if codec == "fp32" else f", codec {codec}"
        return RunFacts(
            policy=self.config.policy,
            is_default=self._training.is_default,
            devices=self._devices,
            memory_bytes=self._memory_bytes,
            transport=self.worker.group.transport + coded,
            reduction_bytes=self._synchroniser.extra_bytes,
        )

    def steps_at(self, samples: float) -> float:
        """Steps of the run at ``samples`` of the epoch, counted from a resume."""
        return self._observer.steps.at(samples + self.epochs.resumed_samples)

    def heeds_signals(self, heeds: bool) -> None:
        """Notifies the launcher whether this rank ends cleanly after a signal."""
        self.worker.heeds_signals(heeds)

    def report_saved(self, text: str) -> None:
        """Reports a complete checkpoint to the coordinator."""
        self.worker.send(CheckpointSaved(rank=self.worker.rank, text=text))

    def follow(self, scheduler: LRScheduler) -> None:
        """Has a scheduler follow the run's progress in windows."""
        self._observer.schedulers.add(scheduler)

    def epoch(self, steps: int = -1) -> Iterator[Any]:
        """Opens the next epoch, of at most ``steps`` steps; yields this rank's part."""
        return self.epochs.iterate(steps)

    def leave(self) -> None:
        """Leaves the run; the first rank emits a summary."""
        is_end = not self._closed
        self.close(Left(rank=self.worker.rank))
        if not is_end or self.rank:
            return
        batch_size = self._training.loader.batch_size
        lines = [self.notifications.summary(self.config.policy, self.policy)]
        if self.policy == "sync" and batch_size is not None:
            lines.append(self.notifications.whole_sample_bound(batch_size))
        for line in filter(None, lines):
            self.notifications.emit(line)

    def close(self, last_event: Event) -> None:
        """Leaves the run. May be called twice."""
        if self._closed:
            return
        try:
            if not isinstance(last_event, Failed):
                if isinstance(self.epochs.under_way, WindowEpoch):
                    self.notifications.emit(HELD.format(self.policy))
                self.epochs.end_iteration()
                self._observer.count_unstepped()
                if (count := self._observer.unstepped) and self.policy != "sync":
                    logger.warning(UNSTEPPED, self.worker.rank, count, self.policy)
                last_event = self.epochs.left_how(last_event)
        finally:
            self._closed = True
            self._release()
            self.worker.close(last_event)
            write_part(self.worker.timeline)
            with contextlib.suppress(Exception):  # at exit modules may be gone
                self.epochs.end_iteration()

    def _release(self) -> None:
        """Removes every hook from model and optimizer, in reverse order."""
        self._synchroniser.detach()
        self.epochs.close()
