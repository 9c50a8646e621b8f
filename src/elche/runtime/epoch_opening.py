"""One rank's way into an epoch, with all ranks, whoever dies or joins meanwhile."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, final

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.protocol.events import EpochOpened, JoinReady, Regrouped
from elche.coordination.protocol.instructions import BeginEpoch, Instruction, Regroup
from elche.coordination.sync.lost_ranks import StepPlace
from elche.errors import MismatchError, RankLostError
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.process.worker import Worker
from elche.runtime.windows.regrouping import Regrouping
from elche.runtime.windows.step_regrouping import StepRegrouping
from elche.runtime.windows.synchroniser import Synchroniser


@final
class EpochOpening:
    """Opens epochs with all ranks, and forms the next group outside of windows.

    Args:
        worker: this rank's shell.
        synchroniser: brings it together with the other ranks.
        order: of the samples.
        regrouping: forms groups in windows and between epochs.
        steps: forms them under ``sync``.

    Attributes:
        epoch: the one that was opened last; -1 before the first.
    """

    def __init__(
        self,
        worker: Worker,
        synchroniser: Synchroniser,
        order: SampleOrder,
        regrouping: Regrouping,
        steps: StepRegrouping,
    ) -> None:
        self._worker = worker
        self._synchroniser = synchroniser
        self._order = order
        self._regrouping = regrouping
        self._steps = steps
        self._opened: EpochOpened | None = None
        self._sizes: BatchSizes | None = None
        self.epoch = -1

    def go_to(self, epoch: int) -> None:
        """The next one to be opened, or that a resumed run stands behind."""
        self.epoch = epoch

    def open(self, opened: EpochOpened, sizes: BatchSizes | None) -> BeginEpoch:
        """Waits until all ranks have opened the epoch, or its next part.

        Args:
            opened: what this rank says of it.
            sizes: of the part's batches; None: of a new epoch, drawn on the first rank.
        """
        self._opened, self._sizes = opened, sizes
        self._send()
        begin = self._worker.expect(BeginEpoch, "all ranks to open the epoch")
        self._steps.begin_part()
        self._opened = None
        return begin

    def _send(self) -> None:
        """Opens the epoch; the first rank says its sizes."""
        opened = self._opened
        assert opened is not None
        if self._worker.place == 0 and opened.sizes is None:
            sizes = self._order.draw() if self._sizes is None else self._sizes
            self._opened = opened = replace(opened, sizes=sizes.runs)
        self._worker.send(opened)

    def share(self, sizes: BatchSizes) -> Any:
        """The epoch's positions, on every rank.

        Raises:
            MismatchError: the rank that drew them has died, and the next one draws
                others.
        """
        order = self._order
        try:
            order.share(self._worker.group)
        except RankLostError:
            if self._worker.on_regroup is None:
                raise
            self.regroup(wants_keys=True)
        assert order.keys is not None
        if len(order.keys) != sizes.num_samples:
            raise MismatchError(
                f"epoch {self.epoch} was drawn with {sizes.num_samples} samples by a "
                f"rank that has died, and anew with {len(order.keys)}: give all ranks "
                "the same data set"
            )
        return order.keys

    def join(self) -> None:
        """Waits for the others to pause, forms the next group, and takes over."""
        worker = self._worker
        worker.send(JoinReady(rank=worker.rank))
        while not worker.is_due:
            worker.receive(self._take_word, "the others to take this rank in")
        self.regroup()

    def _take_word(self, instruction: Instruction) -> None:
        if isinstance(instruction, Regroup):
            self._worker.hear_of(instruction)

    def regroup(self, *, wants_keys: bool = False) -> None:
        """Forms the next group outside of windows; who waits for an epoch says so."""
        worker, has_formed = self._worker, False
        reducer = self._synchroniser.reducer
        while not has_formed:
            worker.hear_of()
            with contextlib.suppress(RankLostError):
                if reducer is None:
                    self._regrouping.form(wants_keys=wants_keys)
                else:
                    place = StepPlace(reducer.closed_passes, first=0, begun=-1)
                    self._steps.form(place, wants_keys=wants_keys)
                has_formed = True
        if self._opened is not None:
            self._send()
        if reducer is not None and wants_keys:  # others may be in its steps
            self._steps.say_regrouped(self.epoch)
            return
        worker.send(
            Regrouped(
                rank=worker.rank,
                generation=worker.generation,
                epoch=self.epoch,
                reduced=-1,
            )
        )
