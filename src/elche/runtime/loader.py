"""The loader that `elche.setup` returns in place of the user's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from elche.runtime.run import Run
from elche.runtime.single import SingleRun


class RunLoader:
    """Hands out this rank's part of each epoch of a run.

    Under ``sync`` every rank gets a share of each global batch; under ``cadence`` each
    rank gets whole batches, as many as its speed allows, so a loop body runs a
    different number of times on each rank. ``len()`` is the single-process length;
    everything else but iteration is the user's loader's.

    Args:
        loader: the user's loader.
        positions: the loader of the same data that the run divides.
        run: the run.
    """

    def __init__(
        self, loader: DataLoader[Any], positions: DataLoader[Any], run: Run | SingleRun
    ) -> None:
        self._loader = loader
        self._positions = positions
        self._run = run

    def __len__(self) -> int:
        """Batches of an epoch in a single process, whatever this rank's share."""
        return len(self._positions)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return self._run.epoch()
