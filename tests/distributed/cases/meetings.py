"""What ranks do together between epochs, while one of them dies."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset

import elche
from elche.checkpoint.writer import CheckpointWriter
from elche.coordination.protocol.events import BarrierReached
from elche.runtime.process.worker import Worker
from elche.session.process import process
from tests.distributed.cases.late_sums import PATIENCE_S
from tests.harness.waiting import until

SIZE = 150
ROOM_BYTES = 4096
"""Less than the state of a random generator."""


class Numbers(Dataset[float]):
    """The first numbers."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> float:
        return float(index)


@final
class Meeting:
    """Called by all ranks after each epoch.

    Args:
        what: the name of one of the methods below.
        folder: where ranks say how far they are.
        rank: this one.

    Attributes:
        found: what it returned, of each epoch.
        is_under_way: whether it has begun.
        at_step: called at each batch that is evaluated, if the other ranks are through
            with theirs.
    """

    def __init__(self, what: str, folder: str, rank: int) -> None:
        self._meet: Callable[[], Any] = getattr(self, what)
        self._folder, self._rank = folder, rank
        self._checkpoints = Path(folder, "checkpoints")
        self.found: list[Any] = []
        self.is_under_way = False
        self.at_step: Callable[[], object] | None = None
        self._waits = 0
        send = Worker.send

        def sent(worker: Worker, *events: Any) -> None:
            send(worker, *events)
            if self.is_under_way and isinstance(events[0], BarrierReached):
                self._waits += 1
                self._file(rank, self._waits).touch()

        Worker.send = sent  # type: ignore[method-assign]

    def __call__(self) -> None:
        self.is_under_way = True
        found = self._meet()
        self.is_under_way = False
        if found is not None:
            self.found.append(found)

    def nothing(self) -> None:
        return

    def barrier(self) -> None:
        elche.barrier()

    copies = barrier

    def evaluate(self) -> float:
        loss = elche.evaluate(self._step, DataLoader(Numbers(), batch_size=8))
        return float(loss)

    def predict(self) -> float:
        rows = elche.predict(self._rows, DataLoader(Numbers(), batch_size=8))
        assert rows.tolist() == [2.0 * index for index in range(SIZE)]
        return float(rows.mean()) / 2.0

    def gather(self) -> int:
        return len(elche.gather(torch.ones(3)))

    def save(self) -> None:
        elche.save(self._checkpoints)

    def save_whole(self) -> str:
        """Why the checkpoint could not be written, or that it was."""
        self.save()
        writer = process.checkpoints._writers[self._checkpoints]
        said = _outcome_of(writer) if self._rank else ""
        elche.barrier()  # where a death is heard of
        return said or _outcome_of(writer)

    def save_on_a_full_disk(self) -> str:
        """The first time rank 2 has no room for its part."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self._rank == 2 and not self.found:
            resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, before[1]))
        try:
            return self.save_whole()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def resume(self) -> None:
        elche.resume(self._checkpoints)

    def _step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.at_step is not None:
            others = {0, 1, 2, 3} - {self._rank}
            until(lambda: all(self._file(r, self._waits + 1).exists() for r in others))
            self.at_step()
        return batch.mean()

    def _rows(self, batch: torch.Tensor) -> torch.Tensor:
        self._step(batch)
        return 2.0 * batch

    def _file(self, rank: int, waits: int) -> Path:
        return Path(self._folder, f"waits{rank}.{waits}")


def _outcome_of(writer: CheckpointWriter) -> str:
    try:
        writer.wait(PATIENCE_S)
    except elche.errors.CheckpointError as error:
        return str(error)
    return "written"
