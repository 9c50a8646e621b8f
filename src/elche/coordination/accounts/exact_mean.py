"""Weighted means without rounding error, whatever the order of their parts. Pure."""

from __future__ import annotations

import math

MOST_LEFT_OUT = 2**53
"""Counts stop here, so that they travel as 64-bit integers."""


class ExactSum:
    """A sum of floats, rounded once when it is read.

    Keeps non-overlapping partial sums (J. R. Shewchuk, "Adaptive Precision
    Floating-Point Arithmetic", 1997). There are few of them, so an addition costs about
    the same however many came before.
    """

    __slots__ = ("_partials",)

    def __init__(self) -> None:
        self._partials: list[float] = []

    def add(self, value: float) -> None:
        """Adds a finite value."""
        partials, kept = self._partials, 0
        for partial in partials:
            if abs(value) < abs(partial):
                value, partial = partial, value
            high = value + partial
            low = partial - (high - value)
            if low:
                partials[kept] = low
                kept += 1
            value = high
        partials[kept:] = [value]

    def merge(self, other: ExactSum) -> None:
        """Adds another sum."""
        for partial in other._partials:
            self.add(partial)

    @property
    def value(self) -> float:
        """The sum; not finite where it has overflowed."""
        try:
            return math.fsum(self._partials)
        except (OverflowError, ValueError):
            return math.nan


class WeightedMean:
    """The mean of values by their weights, and how many values it lacks."""

    __slots__ = ("_left_out", "_weight", "_weighted_sum")

    def __init__(self) -> None:
        self._weighted_sum = ExactSum()
        self._weight = ExactSum()
        self._left_out = 0

    def add(self, weighted_sum: float, weight: float) -> None:
        """Adds values by their weighted sum and their weight.

        Where either is not finite, or the weight negative, nothing is added; as many
        values as the weight says, at least one, count as left out. A weight of zero
        adds nothing.
        """
        if not (math.isfinite(weighted_sum) and 0.0 <= weight < math.inf):
            self.leave_out(int(weight) if 1.0 <= weight < MOST_LEFT_OUT else 1)
        elif weight > 0.0:
            self._weighted_sum.add(weighted_sum)
            self._weight.add(weight)

    def leave_out(self, count: int) -> None:
        """Counts values that are not added."""
        self._left_out = min(self._left_out + count, MOST_LEFT_OUT)

    def merge(self, other: WeightedMean) -> None:
        """Adds another mean's values."""
        self._weighted_sum.merge(other._weighted_sum)
        self._weight.merge(other._weight)
        self.leave_out(other._left_out)

    @property
    def parts(self) -> tuple[float, float]:
        """Weighted sum, not finite where it has overflowed, and weight."""
        return self._weighted_sum.value, self._weight.value

    @property
    def value(self) -> float | None:
        """The mean; None without values, or where it is beyond the range of floats."""
        weighted_sum, weight = self.parts
        if weight == 0.0:
            return None
        mean = weighted_sum / weight
        return mean if math.isfinite(mean) else None

    @property
    def left_out(self) -> int:
        """Values in no mean; one where the mean itself is beyond the range."""
        beyond = self.value is None and self._weight.value != 0.0
        return min(self._left_out + beyond, MOST_LEFT_OUT)
