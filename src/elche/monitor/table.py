"""The table of contenders, and the little statistics that it needs. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elche.errors import ConfigError

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_NORMAL_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class ContenderResult:
    """Results of one way of training; None where it was not measured.

    Attributes:
        name: the contender, for example ``solo-0``, ``ddp`` or ``elche-sync``.
        samples_per_s: median over the runs.
        samples_per_s_spread: relative spread over the runs, see `spread`.
        efficiency: hardware efficiency, 1.0 being the sum of all devices alone.
        bound: best possible efficiency of this way of training there.
        sample_efficiency: samples that one device needs to the same loss over
            those needed here.
        eval_loss: held-out loss at the end.
        time_to_loss_s: seconds until the loss that all contenders are held to.
        gain: time of the fastest device alone over this one's, to that loss.
        note: a remark for the reader.
    """

    name: str
    samples_per_s: float
    samples_per_s_spread: float | None = None
    efficiency: float | None = None
    bound: float | None = None
    sample_efficiency: float | None = None
    eval_loss: float | None = None
    time_to_loss_s: float | None = None
    gain: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields without the name; numbers that JSON cannot hold become None."""
        values = asdict(self)
        del values["name"]
        return {
            key: None
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for key, value in values.items()
        }


COLUMNS = (
    "contender",
    "samples/s",
    "hardware eff.",
    "bound",
    "sample eff.",
    "eval loss",
    "time to loss",
    "gain",
    "note",
)
"""Headings of the cells that `table_rows` returns."""


def contenders_to_json(results: Sequence[ContenderResult]) -> dict[str, dict[str, Any]]:
    """Results by name, as the benchmark's JSON holds them under ``contenders``."""
    return {result.name: result.to_json() for result in results}


def table_rows(results: Sequence[ContenderResult]) -> list[list[str]]:
    """Cells of the table, a row per contender and a cell per entry of `COLUMNS`."""
    return [
        [
            result.name,
            _rate(result),
            _cell(result.efficiency, "{:.1%}"),
            _cell(result.bound, "{:.1%}"),
            _cell(result.sample_efficiency, "{:.0%}"),
            _cell(result.eval_loss, "{:.4f}"),
            _cell(result.time_to_loss_s, "{:.1f} s"),
            _cell(result.gain, "{:.2f}x"),
            result.note,
        ]
        for result in results
    ]


def plain_table(results: Sequence[ContenderResult]) -> str:
    """The table as aligned text; columns that say nothing are left out."""
    rows = table_rows(results)
    kept = [
        (heading, [row[index] for row in rows])
        for index, heading in enumerate(COLUMNS)
        if any(row[index] not in ("", "-") for row in rows)
    ]
    texts = ("contender", "note")
    lines = [""] * (len(rows) + 1)
    for heading, cells in kept:
        width = max(len(cell) for cell in (heading, *cells))
        for index, cell in enumerate((heading, *cells)):
            left = heading in texts
            lines[index] += (cell.ljust(width) if left else cell.rjust(width)) + "  "
    return "\n".join(line.rstrip() for line in lines)


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

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def paired_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean of the paired differences ours - theirs with its 95 % interval.

    Student's t: the differences are taken as draws from a normal distribution.

    Args:
        ours: one value per seed.
        theirs: the values of the same seeds in the same order.

    Raises:
        ConfigError: on fewer than two pairs or sequences of different lengths.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ConfigError(
            "a paired interval needs at least two pairs of the same seeds, got"
            f" {len(ours)} and {len(theirs)} values"
        )
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    margin = student_t_95(len(differences) - 1) * error
    return Interval(mean, mean - margin, mean + margin)


def student_t_95(degrees_of_freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t.

    Beyond 30 degrees of freedom the first two terms of the expansion around the
    normal quantile (Abramowitz and Stegun, 26.7.5), good to four decimals.

    Raises:
        ConfigError: below one degree of freedom.
    """
    if degrees_of_freedom < 1:
        raise ConfigError(f"expected degrees of freedom, got {degrees_of_freedom}")
    if degrees_of_freedom <= len(_T_95):
        return _T_95[degrees_of_freedom - 1]
    z, n = _NORMAL_95, degrees_of_freedom
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return z + first + second


def time_to_loss(
    curve: Sequence[tuple[float, float]], target_loss: float
) -> float | None:
    """Time or samples at which a curve first reaches a loss, by interpolation.

    Args:
        curve: (time, loss) in order of time; samples may stand for the time.
        target_loss: the loss to reach.

    Returns:
        The time, in the curve's unit; None if the loss is never reached.
    """
    before: tuple[float, float] | None = None
    for at, loss in curve:
        if loss <= target_loss:
            if before is None:
                return at
            done = (before[1] - target_loss) / (before[1] - loss)
            return before[0] + done * (at - before[0])
        if math.isfinite(loss):
            before = (at, loss)
    return None


def _rate(result: ContenderResult) -> str:
    text = f"{result.samples_per_s:.1f}"
    if result.samples_per_s_spread is not None:
        text += f" ±{result.samples_per_s_spread / 2:.1%}"
    return text


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
