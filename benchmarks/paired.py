"""Statistics of repeated runs: spreads, and intervals of means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from elche.errors import ConfigError

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_NORMAL_95 = 1.959964


def spread(values: Sequence[float]) -> float:
    """Range over median: how far runs of one contender lie apart, relatively.

    Raises:
        ConfigError: without values, or with a median of zero.
    """
    if not values or statistics.median(values) == 0:
        raise ConfigError(f"a relative spread needs a median above zero, got {values}")
    return (max(values) - min(values)) / abs(statistics.median(values))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % interval by Student's t; of one value the interval is infinite.

    Values are taken as draws from a normal distribution: of two ways in pairs, the
    differences.
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    margin = student_t_95(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - margin, mean + margin)


def student_t_95(degrees_of_freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t.

    Beyond 30 degrees of freedom the first two terms of the expansion around the
    normal quantile (Abramowitz and Stegun, 26.7.5), good to four decimals.
    """
    if degrees_of_freedom <= len(_T_95):
        return _T_95[degrees_of_freedom - 1]
    z, n = _NORMAL_95, degrees_of_freedom
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return z + first + second
