"""Restricts a rank's shares to few sizes in a run. Pure.

A new size has a cost: a compiled model may be compiled again, libraries search for a
kernel, a device caches another memory layout. So a split uses each rank's earlier
sizes. A new size is used once avoiding it has cost more than its price. The loss, in
steps, adds up, and the price grows with the number of sizes. So shares follow a lasting
change soon, and noise hardly ever. More than `MAX_SIZES` are used only if a step
without them would take a third longer, for many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import final

from elche.cadence.split import pick_sizes, split_from_sizes

MAX_SIZES = 8
"""Most sizes of a rank: Dynamo's limit of compiled versions of a function."""
PRICES = (0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 3.0)
"""Price of a new size in lost steps, by the number of a rank's sizes. The eighth is
kept for the batch at an epoch's end, whose split is the first of its kind.
"""
URGENT_GAIN, URGENT_PRICE, LAST_PRICE = 0.25, 0.3, 20.0
"""Gain (fraction of a step) of urgent sizes, their price, and that beyond eight."""
FRUGAL = 0.01
"""Step time given up for fewer new sizes, as a fraction of the shortest."""
TRIAL_SIZES = 5
"""Number of sizes from which a trial adds no new one."""
LEAST_TRIAL = 1.2
"""Least factor by which a trial's share is larger; a smaller one shows too little."""


@final
class ShareSizes:
    """Sizes that each rank's share has had, in the order of their first use.

    Args:
        used: sizes used before.
    """

    def __init__(self, used: Iterable[Iterable[int]]) -> None:
        self._used = [list(sizes) for sizes in used]
        self._guesses = [set[int]() for _ in self._used]
        self._lost_steps = 0.0

    @property
    def used(self) -> list[list[int]]:
        """Sizes that each rank has used."""
        both = zip(self._used, self._guesses, strict=True)
        return [[*sizes, *sorted(guesses.difference(sizes))] for sizes, guesses in both]

    def use(self, split: Sequence[int], *, is_guess: bool = False) -> None:
        """Records the sizes of a split; a rank without a share has no size.

        Args:
            split: the split.
            is_guess: True during warm-up: later splits do not reuse its sizes.
        """
        for used, guesses, part in zip(self._used, self._guesses, split, strict=True):
            if is_guess and part:
                guesses.add(part)
            elif part and part not in used:
                used.append(part)
                self._lost_steps = 0.0

    def choices(
        self,
        best: tuple[int, ...],
        ranges: Sequence[tuple[int, int]],
        end: Callable[[int, int], float],
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """Returns a split of used sizes, and one that may use new sizes.

        Args:
            best: the shortest split of any sizes.
            ranges: least and largest share that each rank may have.
            end: returns the time at which a rank would finish a share.

        Returns:
            The shortest split of used sizes, None if they cannot sum to the batch; and
            nearly the shortest of all, with new sizes if needed.
        """
        total = sum(best)
        used = [
            [part] if least == most else [n for n in sizes if least <= n <= most]
            for part, sizes, (least, most) in zip(best, self._used, ranges, strict=True)
        ]
        near_s = max(map(end, range(len(best)), best)) * (1.0 + FRUGAL)
        near = [
            [*(n for n in sizes if end(rank, n) <= near_s), best[rank]]
            for rank, sizes in enumerate(used)
        ]
        return split_from_sizes(total, used, end), pick_sizes(total, near) or best

    def had(self, split: Sequence[int], *, guesses: bool = True) -> int:
        """Returns the most sizes of a rank to which the split gives a new one, or 0."""
        pairs = zip(self.used if guesses else self._used, split, strict=True)
        return max((len(used) for used, n in pairs if n and n not in used), default=0)

    def is_worth(
        self, fresh: Sequence[int], gain: float, steps: int, is_settled: bool
    ) -> bool:
        """True if a split is worth its new sizes by now.

        Args:
            fresh: the split.
            gain: fraction of a step that it saves.
            steps: number of steps since the last call.
            is_settled: whether the ranks' times are stable now.
        """
        had = self.had(fresh)
        self._lost_steps += gain * steps
        if self.had(fresh, guesses=False) <= 1 and had < len(PRICES) - 1:
            return True
        is_last = had >= len(PRICES)
        price = math.inf if is_last else PRICES[had]
        if gain >= URGENT_GAIN:
            price = min(price, LAST_PRICE if is_last else URGENT_PRICE)
        return is_settled and self._lost_steps >= price

    def trial(self, rank: int, part: int, most: int, later: int) -> int | None:
        """Returns a larger share of a rank to be tried once; None if there is none.

        Args:
            rank: the rank.
            part: its present share.
            most: most samples that may be tried now.
            later: most samples that may be tried eventually, if no smaller size is
                known and no new size is allowed.
        """
        used = self._used[rank]
        least = max(part + 1, math.ceil(LEAST_TRIAL * part))
        known = [size for size in used if size >= least]
        if any(size <= most for size in known):
            return max(size for size in known if size <= most)
        if most >= least and len(used) < TRIAL_SIZES:
            return most
        return min((size for size in known if size <= later), default=None)
