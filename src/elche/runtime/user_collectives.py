"""Collectives that the user's script calls, inside a loop or between epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import final

import torch

from elche.comm.tensors.row_gather import RowGather
from elche.config import RunConfig
from elche.coordination.protocol.events import BarrierReached
from elche.coordination.protocol.instructions import (
    BarrierPassed,
    Instruction,
    Regroup,
)
from elche.errors import ConfigError, RankLostError
from elche.runtime.epochs.run_epochs import RunEpochs
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.runtime.process.worker import Worker
from elche.runtime.sync.sync_epoch import SyncEpoch


@final
class UserCollectives:
    """Barriers, texts and rows of all ranks of a run.

    Args:
        worker: this rank's worker.
        config: the agreed settings.
        epochs: epochs of the run.
    """

    def __init__(self, worker: Worker, config: RunConfig, epochs: RunEpochs) -> None:
        self._worker = worker
        self._config = config
        self._epochs = epochs
        self._rows: RowGather | None = None
        self._rows_of = -1

    def barrier(self, name: str, make: Callable[[], str] = str) -> str:
        """Waits for every rank; returns the text that the first one makes.

        Raises:
            ConfigError: inside a loop under ``cadence``, or on a rank that is to join.
        """
        worker, under_way = self._worker, self._epochs.under_way
        is_first = False
        self._epochs.execution.check()
        self._refuse_new(name)
        if isinstance(under_way, WindowEpoch):
            raise self._would_hang("a barrier", "call it between epochs")
        passed: list[BarrierPassed] = []

        def handle(instruction: Instruction) -> None:
            if isinstance(instruction, BarrierPassed):
                passed.append(instruction)
            elif isinstance(instruction, Regroup) and worker.on_regroup:
                worker.note_regroup(instruction)
                worker.on_regroup()
                if not is_first and worker.place == 0:
                    reach()
            elif isinstance(under_way, SyncEpoch):
                under_way.handle(instruction)

        def reach() -> None:
            nonlocal is_first
            is_first = worker.place == 0
            text = make() if is_first else None
            saves = name == "elche.save"  # one model of all ranks
            checks = self._epochs.execution.sums.whole() if saves else ()
            worker.send(
                BarrierReached(rank=worker.rank, name=name, text=text, checks=checks)
            )

        if under_way is not None:
            self._epochs.opening.steps.meet("elche.barrier()")
        else:
            worker.regroup_if_due()
        reach()
        while not passed:
            worker.receive(handle, f"all ranks at {name}")
        return passed[0].text

    def gather_rows(
        self,
        tensor: torch.Tensor,
        call: str = "elche.all_gather",
        *,
        is_of_batch: bool = True,
    ) -> torch.Tensor:
        """The rows of all ranks, weighted as the gradients of the current batch are.

        Args:
            tensor: this rank's rows.
            call: name of the user's call, for messages.
            is_of_batch: omit rows of a batch that counts for another rank.

        Raises:
            ConfigError: ranks train in windows.
        """
        self._refuse_new(call)
        worker, under_way = self._worker, self._epochs.under_way
        if isinstance(under_way, WindowEpoch):
            raise self._would_hang(call, "use policy='sync', or call it between epochs")
        if under_way is None:
            if tensor.requires_grad and self._epochs.has_open_batches:
                raise ConfigError(
                    f"{call} after the loader's end: run the forward and "
                    "backward passes of each batch before the next one is fetched"
                )
            return self._gather_between(tensor, call)
        self._epochs.opening.steps.meet(f"{call}()")
        worker.meets_in_forward = True
        weight = under_way.current_weight if is_of_batch else 1.0
        if self._config.loss_reduction == "sum":
            weight = float(weight > 0.0)
        return self._gather(tensor, weight, call)

    def _gather(self, tensor: torch.Tensor, weight: float, call: str) -> torch.Tensor:
        groups = self._worker.groups
        if self._rows is None or self._rows_of != groups.generation:
            self._rows_of = groups.generation
            self._rows = RowGather(groups.side())
        return self._rows.gather(tensor, weight, call)

    def _gather_between(self, tensor: torch.Tensor, call: str) -> torch.Tensor:
        """Gathers between epochs; survivors repeat it if a rank dies meanwhile.

        Either all ranks learn of a death before the next barrier passes, or all after.
        """
        worker = self._worker
        if worker.on_regroup is None:
            return self._gather(tensor, 1.0, call)
        self.barrier("sums")
        while True:
            generation, rows = worker.groups.generation, tensor
            with contextlib.suppress(RankLostError):
                rows = self._gather(tensor, 1.0, call)
            self.barrier("sums")
            if generation == worker.groups.generation:
                return rows

    def _refuse_new(self, call: str) -> None:
        if self._worker.is_new:
            raise ConfigError(
                f"{call} before this rank has joined the run: the other ranks are at "
                "another call; use it inside `for epoch in elche.epochs(...)`"
            )

    def _would_hang(self, call: str, instead: str) -> ConfigError:
        return ConfigError(
            f"{call} inside the loop would wait for ever: under policy "
            f"{self._config.policy!r} ranks run different numbers of batches; {instead}"
        )
