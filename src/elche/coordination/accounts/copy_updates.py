"""Updates of averaged copies of the model (EMA, SWA), counted in samples. Pure.

A plain loop updates such a copy after some of its batches. Under windows each rank runs
other batches, so its calls only tell which samples an update follows; what is due is
counted by the samples of all ranks, and carried out with the common model at a commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import final


@final
class CopySamples:
    """Samples whose batches updated copies, of all ranks, until a commit has them.

    Copies have numbers, in the order in which each rank has come to know them. One that
    a rank does not know yet waits for it, to the end of the epoch: all are to hold the
    same. A rank that is given no work is not waited for.
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
        """All ranks have closed a window; returns what its commit brings each copy.

        Each rank reports samples of as many copies as it knows.
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
    """Whole updates of one copy that samples amount to; the rest is carried over.

    An epoch whose every batch updates the copy makes as many updates as a single
    process takes steps in it, whatever the windows.
    """

    def __init__(self) -> None:
        self._rest = Fraction(0)

    def state_dict(self) -> list[int]:
        """State for the next part."""
        return [self._rest.numerator, self._rest.denominator]

    def load_state_dict(self, state: Sequence[int]) -> None:
        """Goes on from :meth:`state_dict`."""
        self._rest = Fraction(*state)

    def take(self, samples: int, epoch_batches: int, epoch_samples: int) -> int:
        """Updates that are due after so many more samples.

        The epoch has ``epoch_samples`` in as many steps of a single process.
        """
        self._rest += Fraction(samples * epoch_batches, epoch_samples)
        due = int(self._rest)
        self._rest -= due
        return due
