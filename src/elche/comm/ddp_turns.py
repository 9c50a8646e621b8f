"""Several wrappers in one process group: whose backward pass it is.

Collectives of one group are paired by their order. Where ranks run the backward passes
of two models in another order, sums of one model meet those of the other, and gloo ends
the process if their sizes differ. So where a group serves several wrappers, a pass
begins with a word of each rank about which one it is. In shared memory every wrapper
has its own messages, and nothing can be mixed up: there the deadline names what each
rank was doing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from elche.comm.process_group import Group
from elche.errors import CommunicationError

_ids = itertools.count()
_wrappers: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
ADVICE = (
    "run the backward passes of models in one group in the same order on every rank, "
    "or wrap each model in a group of its own"
)


def new_wrapper() -> int:
    """Tells this process's wrappers apart."""
    return next(_ids)


@final
class Turn:
    """One wrapper's part in a group.

    Args:
        group: the process group.
        wrapper: of this process; see :func:`new_wrapper`.
        number: tells wrappers apart, the same on all ranks.
        name: of the model, for messages to people.
    """

    def __init__(self, group: Group, wrapper: int, number: int, name: str) -> None:
        self._group = group
        self._number = number
        self.name = f"{name} (wrapper {number})"
        key = getattr(group, "torch_group", group)
        self._wrappers = _wrappers.setdefault(key, set())
        self._wrappers.add(wrapper)

    def begin(self) -> None:
        """A pass begins on this rank; compared where messages could be mixed up.

        Raises:
            CommunicationError: another rank begins another wrapper's.
        """
        group = self._group
        if len(self._wrappers) < 2 or group.shares_host or group.world_size == 1:
            return
        numbers = torch.zeros(group.world_size, dtype=torch.int64)
        numbers[group.rank] = self._number
        group.all_reduce(numbers, "agreeing on whose turn it is")
        self._compare(numbers.tolist())

    def _compare(self, numbers: Sequence[int]) -> None:
        for rank, number in enumerate(numbers):
            if number != self._number:
                raise CommunicationError(
                    f"ranks are out of step: rank {self._group.rank} was reducing "
                    f"{self.name}, rank {rank} wrapper {number}; {ADVICE}"
                )
