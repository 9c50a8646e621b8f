"""Updates of averaged copies of the model (EMA, SWA), counted in samples. Pure.

A plain loop updates such a copy after some of its batches. Under windows ranks run
different batches, so a call only marks the samples that its update covers. Due updates
are counted by the samples of all ranks, and applied to the common model at a commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import final


@final
class CopySamples:
    """Samples whose batches updated copies, of all ranks, until the next commit.

    Copies are numbered in the order in which a rank registers them. A copy's samples
    wait until every rank has registered it, at the latest until the epoch's last
    window: all ranks must hold equal copies. Idle ranks are not waited for.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def closed(
        self,
        samples: Mapping[int, Sequence[int]],
        idle: Collection[int],
        *,
        is_last: bool,
    ) -> tuple[int, ...]:
        """Records a closed window; returns each copy's samples for its commit.

        Each rank reports samples of every copy that it has registered.
        """
        for more in samples.values():
            pairs = zip_longest(self._waiting, more, fillvalue=0)
            self._waiting = [before + new for before, new in pairs]
        known = [len(each) for rank, each in samples.items() if rank not in idle]
        count = len(self._waiting) if is_last else min(known, default=0)
        ready, self._waiting[:count] = self._waiting[:count], [0] * count
        return tuple(ready)


@final
class DueUpdates:
    """Whole updates of one copy that are due; the fraction is carried over.

    If every batch of an epoch updates the copy, the epoch makes one update per step of
    a single process, for any windows.
    """

    def __init__(self) -> None:
        self._rest = Fraction(0)

    def state_dict(self) -> list[int]:
        """Returns the carried fraction as numerator and denominator."""
        return [self._rest.numerator, self._rest.denominator]

    def load_state_dict(self, state: Sequence[int]) -> None:
        """Restores the fraction from :meth:`state_dict`."""
        self._rest = Fraction(*state)

    def take(self, samples: int, epoch_batches: int, epoch_samples: int) -> int:
        """Adds samples; returns the number of updates that are due.

        The epoch has ``epoch_samples`` samples in ``epoch_batches`` global batches.
        """
        self._rest += Fraction(samples * epoch_batches, epoch_samples)
        due = int(self._rest)
        self._rest -= due
        return due
