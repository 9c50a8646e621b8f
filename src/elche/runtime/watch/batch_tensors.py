"""Batches that the loop holds, told by the memory of their tensors.

Only weak references are kept. Addresses would not do: freed memory is used again, but
not what a weak reference to a storage names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elche.comm.tensors.nested import outputs_in
from elche.torch_internals.batches import storage_key

MOST_TENSORS = 32
"""Most tensors of a batch that are kept."""


@final
class BatchForwards:
    """The forward passes of one batch; autograd calls it when it comes to one.

    Args:
        batch: label of the batch.
        moves: how often the parameters had been replaced.
        number: of the batch, in the order of the run.
        on_backward: called with this when a backward pass comes to its graph, if it
            still is there.

    Attributes:
        has_data: the batch has tensors that no other batch shares.
        had_forward: a forward pass with a gradient has read the batch.
        had_backward: a backward pass has come.
    """

    def __init__(
        self,
        batch: Any,
        moves: int,
        number: int,
        on_backward: Callable[[], Callable[[BatchForwards], None] | None],
    ) -> None:
        self.batch = batch
        self.moves = moves
        self.number = number
        self.has_data = self.had_forward = self.had_backward = False
        self._storages: list[StorageWeakRef] = []
        self._on_backward = on_backward

    def __call__(self, gradients: Any) -> None:
        if (on_backward := self._on_backward()) is not None:
            on_backward(self)

    @property
    def is_held(self) -> bool:
        """Whether something holds a tensor of the batch."""
        return any(not storage.expired() for storage in self._storages)

    def own(self, storage: StorageWeakRef) -> None:
        """The batch has a storage."""
        self._storages.append(storage)
        self.has_data = True

    def share(self, storage: StorageWeakRef) -> None:
        """Another batch has the storage as well, so it tells neither."""
        self._storages.remove(storage)
        self.has_data = bool(self._storages)


@final
class BatchTensors:
    """Finds the batch that a value's tensors are of, views included."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, BatchForwards | None]] = {}
        self._most = MOST_TENSORS

    def keep(self, batch: BatchForwards, data: Any) -> None:
        """A batch is yielded."""
        if len(self._of) >= self._most:
            kept = {k: v for k, v in self._of.items() if not v[0].expired()}
            self._of, self._most = kept, MOST_TENSORS + 2 * len(kept)
        for tensor in islice(outputs_in(data), MOST_TENSORS):
            key = storage_key(tensor)
            if key is None:
                continue
            held = self._of.get(key)
            if held is None:
                storage = StorageWeakRef(tensor.untyped_storage())
                self._of[key] = storage, batch
                batch.own(storage)
            elif held[1] is not None and held[1] is not batch:
                held[1].share(held[0])
                self._of[key] = held[0], None

    def newest(self, values: Iterable[Any]) -> BatchForwards | None:
        """The batch fetched last of those whose tensors are among these."""
        found: BatchForwards | None = None
        for value in values:
            is_tensor = isinstance(value, torch.Tensor)
            for tensor in (value,) if is_tensor else outputs_in(value):
                key = storage_key(tensor)
                batch = None if key is None else self._of.get(key, (None, None))[1]
                if batch and (found is None or batch.number > found.number):
                    found = batch
        return found
