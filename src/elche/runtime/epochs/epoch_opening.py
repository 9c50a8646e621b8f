"""Opening of an epoch with all ranks, while some may die or join."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

import torch

from elche.comm.transport.probe import probe_reduction_s
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.protocol.events import EpochOpened, JoinReady, Regrouped
from elche.coordination.protocol.instructions import BeginEpoch, Instruction, Regroup
from elche.coordination.sync.lost_ranks import StepPlace
from elche.errors import MismatchError, RankLostError
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.process.worker import Worker
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.sync.step_groups import StepGroups
from elche.runtime.training import Training, generators_of
from elche.runtime.watch.observer import LoopObserver
from elche.runtime.windows.regrouping import Regrouping
from elche.runtime.windows.synchroniser import Synchroniser

BUILT: Final = "building what a policy needs"


@final
class EpochOpening:
    """Opens epochs with all ranks, and forms the next group outside of windows.

    Attributes:
        worker: this rank's worker.
        synchroniser: reducers of the policy in force.
        order: order of the samples.
        regrouping: forms groups in windows and between epochs.
        steps: forms groups of active ranks under ``sync``.
        epoch: number of the epoch opened last, or finished before a resume; -1 before
            the first.
    """

    def __init__(
        self,
        worker: Worker,
        training: Training,
        synchroniser: Synchroniser,
        observer: LoopObserver,
        notifications: RunNotifications,
    ) -> None:
        self.worker = worker
        self.synchroniser = synchroniser
        config = training.config
        self.order = SampleOrder(
            training.loader,
            [*generators_of(training.loader).values()],
            sends_state=worker.survives,
        )
        self.regrouping = Regrouping(
            worker,
            synchroniser,
            self.order,
            training.pauses.send_state,
            notifications,
            min_ranks=config.min_ranks,
        )
        self.steps = StepGroups(training, observer, self.regrouping)
        self._opened: EpochOpened | None = None
        self._sizes: BatchSizes | None = None
        self._builds = ""
        self._is_shared = False
        self.epoch = -1
        self._probes = config.policy == "auto"
        self._probe_s = 0.0

    def open(self, opened: EpochOpened, sizes: BatchSizes | None) -> BeginEpoch:
        """Waits until all ranks have opened the epoch, or its next part.

        Args:
            opened: this rank's message about the epoch.
            sizes: sizes of the part's batches; None: the first rank draws a new epoch.
        """
        self._opened, self._sizes = opened, sizes
        self._is_shared = False
        self._send()
        begin = self.worker.expect(BeginEpoch, "all ranks to open the epoch")
        self.steps.begin_part()
        self._opened = None
        return begin

    def probe(self) -> None:
        """Measures one reduction with all ranks of the group, under ``auto``."""
        if self._probes:
            numel = self.synchroniser.num_parameters
            self._probe_s = probe_reduction_s(self.worker.group, numel)

    def _send(self) -> None:
        """Sends `EpochOpened`; the first rank adds the batch sizes."""
        assert self._opened is not None
        self._opened = opened = replace(self._opened, probe_s=self._probe_s)
        if self.worker.place == 0 and opened.sizes is None:
            sizes = self.order.draw() if self._sizes is None else self._sizes
            self._opened = opened = replace(opened, sizes=sizes.runs)
        self.worker.send(opened)

    def build(
        self, policy: str, build: Callable[[], None], *, wants_keys: bool = False
    ) -> None:
        """Builds a policy's reducers with all ranks; repeats if a rank dies meanwhile.

        A barrier follows: no rank trains before all have built, and from then on a
        death is handled as in training.

        Args:
            policy: policy that is to be in force.
            build: builds with all ranks of the current group.
            wants_keys: this rank waits for the positions of an epoch that has begun.
        """
        worker, regrouping = self.worker, self.regrouping
        self._builds, regrouping.is_building = policy, True
        has_met = False
        while not has_met:
            if worker.is_due:
                self.regroup(wants_keys=wants_keys)
                self._is_shared = wants_keys
                has_met = not regrouping.is_building
                continue
            try:
                if regrouping.is_building:
                    build()
                    regrouping.is_building = False
                worker.group.all_reduce(torch.zeros(1, device="cpu"), BUILT)
                has_met = True
            except RankLostError:
                worker.note_regroup()
        self._builds = ""

    def share(self, sizes: BatchSizes) -> Any:
        """Shares the epoch's positions with every rank.

        Raises:
            MismatchError: the rank that drew them has died, and the next rank draws
                different ones.
        """
        order = self.order
        try:
            if not self._is_shared:
                order.share(self.worker.group)
        except RankLostError:
            if self.worker.on_regroup is None:
                raise
            self.regroup(wants_keys=True)
        assert order.keys is not None
        if len(order.keys) != sizes.num_samples:
            raise MismatchError(
                f"epoch {self.epoch} was drawn with {sizes.num_samples} samples by a "
                f"rank that died, and redrawn with {len(order.keys)}: give all ranks "
                "the same data set"
            )
        return order.keys

    def join(self) -> None:
        """Waits for the others to pause, forms the next group, and adopts its state."""
        worker = self.worker
        worker.send(JoinReady(rank=worker.rank))
        while not worker.is_due:
            worker.receive(self._on_instruction, "the other ranks to admit this rank")
        self.regroup()

    def _on_instruction(self, instruction: Instruction) -> None:
        if isinstance(instruction, Regroup):
            self.worker.note_regroup(instruction)

    def regroup(self, *, wants_keys: bool = False) -> None:
        """Forms the next group outside windows; ranks that await an epoch report it."""
        worker, regrouping = self.worker, self.regrouping
        has_formed = in_steps = False
        while not has_formed:
            worker.note_regroup()
            with contextlib.suppress(RankLostError):
                group = regrouping.meet(wants_keys=wants_keys)
                # New ranks learn the policy there; reducers may be half built.
                in_steps = (self._builds or self.synchroniser.policy) == "sync"
                if in_steps:
                    reducer = self.synchroniser.reducer
                    passes = 0 if reducer is None else reducer.closed_passes
                    self.steps.settle(group, StepPlace(passes, first=0, begun=-1))
                else:
                    regrouping.settle(group)
                if regrouping.has_joined:
                    self.probe()
                has_formed = True
        if self._opened is not None:
            self._send()
        if in_steps and (wants_keys or self._builds):  # others may be in its steps
            self.steps.report_regrouped(self.epoch)
            return
        rank, generation = worker.rank, worker.groups.generation
        worker.send(Regrouped(rank=rank, generation=generation, epoch=self.epoch))
