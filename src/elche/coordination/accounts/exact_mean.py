"""Weighted means without rounding error, whatever the order of their parts. Pure."""

from __future__ import annotations

import math
from fractions import Fraction

MOST_LEFT_OUT = 2**53
"""Upper bound of the count of excluded values, so that it fits a 64-bit integer."""


class WeightedMean:
    """Weighted mean of values, with a count of the values excluded from it."""

    __slots__ = ("_excluded", "_weight", "_weighted_sum")

    def __init__(self) -> None:
        self._weighted_sum = self._weight = Fraction()
        self._excluded = 0

    def add(self, weighted_sum: float, weight: float) -> None:
        """Adds values by their weighted sum and their weight.

        If either is not finite, or the weight is negative, nothing is added: ``weight``
        values, at least one, count as excluded. A weight of zero adds nothing.
        """
        if not (math.isfinite(weighted_sum) and 0.0 <= weight < math.inf):
            self.exclude(int(weight) if 1.0 <= weight < MOST_LEFT_OUT else 1)
        elif weight > 0.0:
            self._weighted_sum += Fraction(weighted_sum)
            self._weight += Fraction(weight)

    def exclude(self, count: int) -> None:
        """Counts values excluded from the mean."""
        self._excluded = min(self._excluded + count, MOST_LEFT_OUT)

    def merge(self, other: WeightedMean) -> None:
        """Adds another mean's values."""
        self._weighted_sum += other._weighted_sum
        self._weight += other._weight
        self.exclude(other._excluded)

    @property
    def parts(self) -> tuple[float, float]:
        """Weighted sum and weight, each rounded once; NaN where one has overflowed."""
        return _rounded(self._weighted_sum), _rounded(self._weight)

    @property
    def value(self) -> float | None:
        """The mean; None without values, or where it is beyond the range of floats."""
        weighted_sum, weight = self.parts
        mean = weighted_sum / weight if weight else math.nan
        return mean if math.isfinite(mean) else None

    @property
    def excluded(self) -> int:
        """Number of excluded values, plus one if the mean itself overflows."""
        beyond = self.value is None and self._weight != 0
        return min(self._excluded + beyond, MOST_LEFT_OUT)


def _rounded(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.nan
