"""Batches that the loop holds, told by the memory of their tensors.

Only weak references are kept. Addresses would not do: freed memory is used again, but
not what a weak reference to a storage names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elche.comm.tensors.nested import outputs_in


@final
@dataclass(eq=False, slots=True)
class BatchForwards:
    """The forward passes of one batch; autograd calls it when it comes to one.

    Attributes:
        batch: its label.
        moves: how often the parameters had been replaced.
        number: of the batch, in the order of the run.
        on_backward: returns what is called with this then, or None.
        had_forward: a forward pass with a gradient has read the batch.
        had_backward: a backward pass has come.
        storages: of its tensors, but for those that another batch shares.
    """

    batch: Any
    moves: int
    number: int
    on_backward: Callable[[], Any]
    had_forward: bool = False
    had_backward: bool = False
    storages: list[StorageWeakRef] = field(default_factory=list)

    def __call__(self, gradients: Any) -> None:
        """Autograd has come to the graph."""
        if (on_backward := self.on_backward()) is not None:
            on_backward(self)

    @property
    def is_held(self) -> bool:
        """True while something holds a tensor of the batch."""
        return any(not storage.expired() for storage in self.storages)


@final
class BatchTensors:
    """Finds the batch that a value's tensors are of, views included."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, BatchForwards | None]] = {}
        self._most = 64

    def keep(self, batch: BatchForwards, data: Any) -> None:
        """A batch is yielded; memory that two batches share tells neither."""
        if len(self._of) >= self._most:
            kept = {k: v for k, v in self._of.items() if not v[0].expired()}
            self._of, self._most = kept, 64 + 2 * len(kept)
        for storage in _storages_in(data):
            _, other = self._of.setdefault(storage.cdata, (storage, batch))
            if other is batch:
                batch.storages.append(storage)
            elif other is not None:
                other.storages.remove(storage)
                self._of[storage.cdata] = storage, None

    def newest(self, values: Any) -> BatchForwards | None:
        """The batch fetched last of those whose tensors are among these."""
        newest = None
        for storage in _storages_in(values):
            _, batch = self._of.get(storage.cdata, (None, None))
            if batch is not None and (newest is None or batch.number > newest.number):
                newest = batch
        return newest


def _storages_in(values: Any) -> list[StorageWeakRef]:
    """Storages of tensors, each part of a list or tuple looked into."""
    storages = []
    for part in values if isinstance(values, list | tuple) else (values,):
        for tensor in (part,) if isinstance(part, torch.Tensor) else outputs_in(part):
            try:
                storages.append(StorageWeakRef(tensor.untyped_storage()))
            except (NotImplementedError, RuntimeError):
                continue  # sparse, or inside of functorch
    return storages
