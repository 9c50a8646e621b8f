"""Collectives that the user's script calls, inside a loop or between epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from elche.comm.tensors.row_gather import RowGather
from elche.comm.transport.process_group import gather_texts
from elche.config import RunConfig
from elche.coordination.protocol.events import BarrierReached
from elche.coordination.protocol.instructions import (
    BarrierPassed,
    Instruction,
    Regroup,
)
from elche.errors import ConfigError
from elche.runtime.epochs.run_epochs import RunEpochs
from elche.runtime.epochs.sync_epoch import SyncEpoch
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.runtime.process.worker import Worker


@final
class UserCollectives:
    """Barriers, texts and rows of all ranks of a run.

    Args:
        worker: this rank's shell.
        config: the agreed settings.
        epochs: of the run, in one of which the loop may be.
    """

    def __init__(self, worker: Worker, config: RunConfig, epochs: RunEpochs) -> None:
        self._worker = worker
        self._config = config
        self._epochs = epochs
        self._rows: RowGather | None = None
        self._rows_of = -1

    def agree(self, make: Callable[[], str], what: str) -> str:
        """What rank 0 makes, on every rank; called by all of them."""
        self._meet_to_sum()
        own = make() if self._worker.place == 0 else ""
        return gather_texts(self._worker.group, own, what)[0]

    def barrier(self, name: str) -> None:
        """Waits until every rank is here.

        Raises:
            ConfigError: inside a loop under ``cadence``, or on a rank that is to join.
        """
        worker, under_way = self._worker, self._epochs.under_way
        self._epochs.execution.check()
        self._refuse_new(name)
        if isinstance(under_way, WindowEpoch):
            raise self._would_hang("a barrier", "call it between epochs")
        passed: list[BarrierPassed] = []

        def handle(instruction: Instruction) -> None:
            if isinstance(instruction, BarrierPassed):
                passed.append(instruction)
            elif isinstance(instruction, Regroup) and worker.on_regroup:
                worker.hear_of(instruction)
                worker.on_regroup()
            elif isinstance(under_way, SyncEpoch):
                under_way.handle(instruction)

        if under_way is not None:
            self._epochs.members.meet("elche.barrier()")
        else:
            worker.regroup_if_told()
        saves = name == "elche.save"  # one model of all ranks
        checks = self._epochs.execution.sums.whole() if saves else ()
        worker.send(BarrierReached(rank=worker.rank, name=name, checks=checks))
        while not passed:
            worker.receive(handle, f"all ranks at {name}")

    def gather_rows(
        self,
        tensor: torch.Tensor,
        call: str = "elche.all_gather",
        *,
        is_of_batch: bool = True,
    ) -> torch.Tensor:
        """The rows of all ranks, weighted as the gradients of the batch in hand are.

        Args:
            tensor: this rank's rows.
            call: of the user's, for messages.
            is_of_batch: rows of a batch that counts for other ranks are left out.

        Raises:
            ConfigError: ranks train in windows.
        """
        self._refuse_new(call)
        worker, under_way = self._worker, self._epochs.under_way
        if isinstance(under_way, WindowEpoch):
            raise self._would_hang(call, "use policy='sync', or call it between epochs")
        weight = 1.0
        if under_way is None:
            self._meet_to_sum()
        else:
            self._epochs.members.meet(f"{call}()")
            worker.meets_in_forward = True
            weight = under_way.weight_in_hand if is_of_batch else 1.0
            if self._config.loss_reduction == "sum":
                weight = float(weight > 0.0)
        if self._rows is None or self._rows_of != worker.groups.generation:
            self._rows_of = worker.groups.generation
            self._rows = RowGather(worker.groups.side())
        return self._rows.gather(tensor, weight, call)

    def _meet_to_sum(self) -> None:
        """Between epochs: a death while ranks wait for each other is outlived here.

        Inside the sum that follows, for milliseconds, it ends the run.
        """
        if self._worker.on_regroup is not None:
            self.barrier("sums")

    def _refuse_new(self, call: str) -> None:
        if self._worker.is_new:
            raise ConfigError(
                f"{call} on a rank that is to join the run: the others call it "
                "elsewhere; call it inside `for epoch in elche.epochs(...)`"
            )

    def _would_hang(self, call: str, instead: str) -> ConfigError:
        return ConfigError(
            f"{call} inside the loop would wait for ever: under policy "
            f"{self._config.policy!r} ranks run different numbers of batches; {instead}"
        )
