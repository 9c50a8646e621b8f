"""One training run on several ranks, as one rank holds it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from elche.comm.model_buffers.known_buffers import shared_tensors
from elche.comm.tensors.equal_tensors import make_equal
from elche.coordination.protocol.events import BarrierReached, Event, Failed, Left
from elche.coordination.protocol.instructions import (
    BarrierPassed,
    EndEpoch,
    Instruction,
    Welcome,
)
from elche.errors import ConfigError
from elche.runtime.memory_limits import RankHost, check_caps
from elche.runtime.notifications import RunNotifications
from elche.runtime.plan_file import PlanFile
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
from elche.runtime.run_epochs import RankWatch, RunEpochs
from elche.runtime.sync_epoch import SyncEpoch
from elche.runtime.training import Training
from elche.runtime.watch.optimizers_seen import OptimizersSeen
from elche.runtime.watch.scaler_skips import ScalerSkips
from elche.runtime.window_epoch import WindowEpoch
from elche.runtime.windows.local_steps import LocalSteps
from elche.runtime.windows.synchroniser import Synchroniser
from elche.runtime.windows.window_sync import refuse_state

logger = logging.getLogger(__name__)


class Run:
    """What a rank holds of the run; made by :meth:`start`.

    Args:
        worker: this rank's shell, its group formed.
        training: what is trained, and the agreed settings.
        devices: device names of all ranks.
        plans: what is recorded or replayed.
    """

    def __init__(
        self,
        worker: Worker,
        training: Training,
        devices: tuple[str, ...],
        plans: PlanFile,
    ) -> None:
        self.worker = worker
        self.config = training.config
        self.notifications = RunNotifications(worker.rank)
        worker.on_notification = self.notifications.handle
        self._devices = devices
        skips = ScalerSkips(training.optimizer, self.notifications.scalars)
        optimizers = OptimizersSeen(training.model, training.optimizer)
        self._synchroniser = Synchroniser(
            training.config,
            training.model,
            training.optimizer,
            worker.group,
            worker.side_group,
            steps=LocalSteps(training.model, optimizers),
            is_weighed=training.weights is not None,
        )
        self._epochs = RunEpochs(
            worker,
            training,
            self._synchroniser,
            self.notifications,
            plans,
            RankWatch(skips, optimizers, devices),
        )
        self._samples_resumed = 0
        self._closed = False

    @staticmethod
    def start(placement: Placement, training: Training, epochs: int | None) -> Run:
        """Joins the run, and makes all replicas equal to rank 0's.

        Raises:
            MismatchError: ranks disagree.
            CommunicationError: the ranks did not come together.
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
            plans = PlanFile.for_rank(config, placement.rank)
            settings = describe(training, epochs)
            worker.send(join_event(placement, settings, model, loader))
            welcome = worker.expect(Welcome, "all ranks to join")
            worker.form_group(welcome, config.transport.kind)
            states = state_tensors(training.optimizer)
            named = [
                *shared_tensors(model, worker.group),
                *((f"state {index}", state) for index, state in enumerate(states)),
            ]
            make_equal(worker.group, named, "the first broadcast")
            run = Run(worker, training, welcome.devices, plans)
            run._epochs.attach()
        except BaseException as error:
            if run is not None:
                run._release()
            worker.close(failure_of(worker.rank, error))
            raise
        return run

    @property
    def progress_samples(self) -> float:
        """Samples of the run so far, the same function on every rank."""
        return self._samples_resumed + self._epochs.progress_samples

    def state_dict(self) -> dict[str, Any]:
        """What this rank's run holds between epochs beside model and optimizer.

        Raises:
            ProtocolError: the parameters have moved since the last one ended.
        """
        windows = self._synchroniser.windows
        return {
            "samples": self._samples_resumed + self._epochs.samples_before,
            "averaging": None if windows is None else windows.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`; with all ranks.

        Raises:
            ConfigError: nothing is averaged in this run.
            MismatchError: a rank's state does not fit, or ranks' do not belong
                together.
        """
        windows, averaging = self._synchroniser.windows, state["averaging"]
        if windows is not None:
            # Who left the last epoch early is awaited in it until it is heard of.
            self.barrier("load_state_dict")
            windows.load_state_dict(averaging)
        elif self.config.policy == "auto":
            if averaging is not None:
                logger.info("policy 'auto' begins as sync: averaging begins anew")
        else:
            refuse_state(averaging)
        self._samples_resumed = state["samples"] - self._epochs.samples_before

    @property
    def is_in_epoch(self) -> bool:
        """Whether the loop is inside an epoch."""
        return self._epochs.under_way is not None

    @property
    def host(self) -> RankHost:
        """What this rank does about a batch that is run in micro-batches."""
        return RankHost(self._synchroniser, self.worker)

    @property
    def samples_in_hand(self) -> int:
        """Samples of the batch in hand that count for this rank."""
        under_way = self._epochs.under_way
        return 0 if under_way is None else under_way.samples_in_hand

    @property
    def weight_in_hand(self) -> float:
        """What the batch in hand weighs in means: its samples, or as the user says."""
        under_way = self._epochs.under_way
        return 0.0 if under_way is None else under_way.weight_in_hand

    @property
    def last_samples(self) -> int:
        """Samples of the batch in hand, or that the last epoch ended with."""
        return self.samples_in_hand or self._epochs.last_samples

    @property
    def reports(self) -> list[EndEpoch]:
        """What the coordinator said of each epoch that has ended."""
        return self._epochs.reports

    def headline(self) -> str:
        """The line that names the devices and whether they differ."""
        kinds = list(dict.fromkeys(self._devices))
        count = len(self._devices)
        if len(kinds) == 1:
            what = f"{count} devices, equal: {count} x {kinds[0]}"
        else:
            parts = [f"{self._devices.count(kind)} x {kind}" for kind in kinds]
            what = f"{count} devices, unequal: {', '.join(parts)}"
        held_mb = self._synchroniser.extra_bytes / 1e6
        return (
            f"elche: {what}; policy {self.config.policy}, {held_mb:.1f} MB for "
            "reductions"
        )

    def check(self) -> None:
        """Raises what went wrong where nothing could be raised."""
        self._epochs.check()

    def barrier(self, name: str) -> None:
        """Waits until every rank is here.

        Raises:
            ConfigError: inside a loop under ``cadence``.
        """
        self.check()
        if isinstance(self._epochs.under_way, WindowEpoch):
            raise ConfigError(
                "a barrier inside the loop would wait for ever: under policy "
                f"{self.config.policy!r} ranks run different numbers of batches; call "
                "it between epochs"
            )
        passed: list[BarrierPassed] = []

        def handle(instruction: Instruction) -> None:
            if isinstance(instruction, BarrierPassed):
                passed.append(instruction)
            elif isinstance(self._epochs.under_way, SyncEpoch):
                self._epochs.under_way.handle(instruction)

        self.worker.send(BarrierReached(rank=self.worker.rank, name=name))
        while not passed:
            self.worker.receive(handle, f"all ranks at {name}")

    def epoch(self) -> Iterator[Any]:
        """Opens the next epoch on all ranks and hands out this rank's part."""
        return self._epochs.iterate()

    def leave(self) -> None:
        """Ends this rank's part, and sums the run up on rank 0. May be called twice."""
        is_end = not self._closed
        self.close(Left(rank=self.worker.rank))
        line = self.notifications.summary(self.config.policy)
        if is_end and line and self.worker.rank == 0:
            self.notifications.emit(line)

    def close(self, last_event: Event) -> None:
        """Leaves the run. May be called twice."""
        if self._closed:
            return
        try:
            if not isinstance(last_event, Failed):
                self._epochs.end_iteration()
        finally:
            self._closed = True
            self._release()
            self.worker.close(last_event)
            with contextlib.suppress(Exception):  # while there are modules to do it
                self._epochs.end_iteration()

    def _release(self) -> None:
        """Takes every hook off model and optimizer, the last one first."""
        self._synchroniser.detach()
        self._epochs.close()
