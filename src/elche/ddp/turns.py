"""Several wrappers in one process group, and the owner of a backward pass.

Collectives of one group are paired by their order. Where ranks run the backward passes
of two models in another order, sums of one model meet those of the other, and gloo ends
the process if their sizes differ. So where a group serves several wrappers, a pass
begins with a word of each rank about which one it is. In shared memory every wrapper
has its own messages, and nothing can be mixed up: there the deadline names what each
rank was doing.

A wrapper may be collected as any object. When its process notices depends on Python,
so it counts until all ranks have said, in the word itself, that no other is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch

from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError

_ids = itertools.count()
ADVICE = (
    "run the backward passes of models in one group in the same order on every rank, "
    "or wrap each model in a group of its own"
)


def new_wrapper() -> int:
    """Tells this process's wrappers apart."""
    return next(_ids)


@dataclass(slots=True)
class _Wrappers:
    """The wrappers of a group in this process.

    Attributes:
        counted: those that all ranks count, as many on each.
        turns: of those that live here.
    """

    counted: set[int] = field(default_factory=set)
    turns: WeakSet[Turn] = field(default_factory=WeakSet)

    @property
    def living(self) -> int:
        """How many live here."""
        return len({turn.wrapper for turn in self.turns})


_wrappers: WeakKeyDictionary[Any, _Wrappers] = WeakKeyDictionary()


@final
class Turn:
    """One wrapper's part in a group.

    Args:
        group: the process group.
        wrapper: of this process; see :func:`new_wrapper`.
        number: distinguishes wrappers, the same on all ranks.
        name: of the model, for messages to people.
    """

    def __init__(self, group: Group, wrapper: int, number: int, name: str) -> None:
        self._group = group
        self._number = number
        self.wrapper = wrapper
        self.name = f"{name} (wrapper {number})"
        key = getattr(group, "torch_group", group)
        self._wrappers = _wrappers.setdefault(key, _Wrappers())
        self._wrappers.counted.add(wrapper)
        self._wrappers.turns.add(self)

    def begin(self) -> None:
        """A pass begins on this rank; compared where messages could be mixed up.

        Raises:
            CommunicationError: another rank begins another wrapper's.
        """
        group, wrappers = self._group, self._wrappers
        if len(wrappers.counted) < 2 or group.shares_host or group.world_size == 1:
            return
        word = torch.zeros(2, group.world_size, dtype=torch.int64, device="cpu")
        word[:, group.rank] = torch.tensor(
            [self._number, wrappers.living], device="cpu"
        )
        group.all_reduce(word, "agreeing on whose turn it is")
        numbers, living = word.tolist()
        self._compare(numbers)
        if max(living) == 1:  # this one, everywhere
            wrappers.counted = {self.wrapper}

    def _compare(self, numbers: Sequence[int]) -> None:
        for rank, number in enumerate(numbers):
            if number != self._number:
                raise CommunicationError(
                    f"ranks are out of step: rank {self._group.rank} was reducing "
                    f"{self.name}, rank {rank} wrapper {number}; {ADVICE}"
                )
