"""Speeds of all ranks: hints, completed costs, and ratios with a dead zone."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from elche.errors import ConfigError

MAX_SPEED_RATIO = 1e6
"""Largest assumed ratio of speeds; ranks further apart are scheduled at this ratio."""
TIME_RANGE = (1e-30, 1e30)
"""Range of a time per unit of work: shorter is no measurement, longer is rejected."""
DEAD_ZONE = 0.10
"""Relative error above which a fresh ratio is replaced by the measured one."""
DEAD_ZONE_FLOOR = 0.03
"""Least dead zone of a long-held ratio."""
DOMINANCE_MARGIN = 0.10
"""Margin by which a rank must be slower than the reference to become it."""

SpeedHints: TypeAlias = Mapping[int, float] | Sequence[float] | None


@final
class HeldRatios:
    """Speed of each rank relative to the slowest rank, with a dead zone.

    The slowest rank is the *reference*, of ratio 1. It is kept until another rank is
    10 % slower, so that near-equal ranks do not alternate. A ratio is replaced when the
    measured ratio leaves its dead zone: 10 % when fresh, shrinking with the square root
    of its reports to 3 %.

    Args:
        costs: time per unit of work of each rank, positive; used unsmoothed.

    Attributes:
        reference: rank that counts as the slowest; the lowest of equal ranks.
        values: speed of each rank relative to the reference.
    """

    def __init__(self, costs: Sequence[float]) -> None:
        self.reference = _slowest(costs)
        self.values = [costs[self.reference] / cost for cost in costs]
        self._held = [1] * len(costs)

    def follow(self, costs: Sequence[float]) -> None:
        """Replaces ratios that left their dead zone; all have the same reference."""
        slowest = _slowest(costs)
        if costs[slowest] > (1.0 + DOMINANCE_MARGIN) * costs[self.reference]:
            self.reference = slowest
        base = self.values[self.reference]
        for rank, cost in enumerate(costs):
            kept = self.values[rank] / base
            measured = costs[self.reference] / cost
            band = max(DEAD_ZONE / math.sqrt(self._held[rank]), DEAD_ZONE_FLOOR)
            leaves = abs(measured - kept) > band * kept
            self.values[rank] = measured if leaves else kept
            self._held[rank] = 1 if leaves else self._held[rank] + 1


def _slowest(costs: Sequence[float]) -> int:
    return max(range(len(costs)), key=costs.__getitem__)


def relative_speeds(hints: SpeedHints, world_size: int) -> tuple[float, ...]:
    """Returns speeds of all ranks relative to the fastest, from a user's hints.

    Args:
        hints: speed per rank, 0.4 being 40 % of a rank with 1.0. A mapping may omit
            ranks, which count as 1.0; a sequence covers every rank; None makes all
            ranks equal.
        world_size: number of ranks.

    Returns:
        One speed per rank, 1.0 for the fastest.

    Raises:
        ConfigError: a hint is not positive and finite, or names an unknown rank, or a
            sequence has another length than ``world_size``.
    """
    speeds = [1.0] * world_size
    if hints is None:
        return tuple(speeds)
    if isinstance(hints, Mapping):
        items = list(hints.items())
    elif len(hints) == world_size:
        items = list(enumerate(hints))
    else:
        raise ConfigError(
            f"speed_hints must name a speed for each of {world_size} ranks, got "
            f"{len(hints)}; use a mapping from rank to speed to name only some"
        )
    for rank, speed in items:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"speed_hints names rank {rank}, but ranks are 0 to {world_size - 1}"
            )
        if not (math.isfinite(speed) and speed > 0.0):
            raise ConfigError(
                f"speed_hints of rank {rank} must be positive and finite, got "
                f"{speed!r}; write 0.4 for a rank at 40 % of the fastest rank's speed"
            )
        speeds[rank] = float(speed)
    fastest = max(speeds)
    return tuple(max(speed / fastest, 1.0 / MAX_SPEED_RATIO) for speed in speeds)


def complete_costs(measured: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Returns costs of all ranks, with unmeasured ranks filled in from their hints.

    An unmeasured rank costs ``k / speed``, with the largest ``k`` of the measured
    ranks. So without hints it counts as the slowest measured rank, and no rank has to
    wait for it. Without any measurement ``k`` is 1.

    Args:
        measured: cost of each rank; 0.0 if not measured.
        speeds: relative speed per rank, from ``relative_speeds``.

    Returns:
        One positive cost per rank, at most ``MAX_SPEED_RATIO`` times the cheapest.
    """
    pairs = [*zip(measured, speeds, strict=True)]
    scale = max((cost * speed for cost, speed in pairs if cost), default=1.0)
    costs = [cost or scale / speed for cost, speed in pairs]
    cheapest = min(costs)
    return [min(cost, cheapest * MAX_SPEED_RATIO) for cost in costs]


def check_int(name: str, value: int, minimum: int) -> int:
    """Returns ``value`` as an int, checked.

    Raises:
        ConfigError: the value is no integer, or below ``minimum``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {value!r}") from None
    if number < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {number}")
    return number


def check_measure(name: str, value: float) -> float:
    """Returns ``value`` as a float, checked to be a possible measurement.

    Raises:
        ConfigError: the value is negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0.0):
        raise ConfigError(f"{name} must be finite and not negative, got {value!r}")
    return float(value)


def check_reports(
    work_name: str,
    work: Sequence[int],
    time_name: str,
    times: Sequence[float],
    world_size: int,
) -> list[tuple[int, int, float]]:
    """Checks one report of all ranks before it changes any state.

    Args:
        work_name: name of the work in messages.
        work: units of work that each rank finished.
        time_name: name of the times in messages.
        times: delivered time of each rank for that work.
        world_size: number of ranks.

    Returns:
        ``(rank, work, time)`` of the ranks that measured something; ranks without
        work or time are omitted.

    Raises:
        ConfigError: a length is not ``world_size``, an amount of work is negative or
            no integer, or a time is negative, not finite or absurd; the message names
            the rank.
    """
    for name, values in ((work_name, work), (time_name, times)):
        if len(values) != world_size:
            raise ConfigError(
                f"{name} must hold one value for each of {world_size} ranks, got "
                f"{len(values)}"
            )
    found = []
    for rank, (units, time) in enumerate(zip(work, times, strict=True)):
        done = check_int(f"{work_name} of rank {rank}", units, 0)
        spent = check_measure(f"{time_name} of rank {rank}", time)
        if spent > TIME_RANGE[1]:
            raise ConfigError(f"{time_name} of rank {rank} is not a time: {spent!r}")
        if done > 0 and spent / done > TIME_RANGE[0]:
            found.append((rank, done, spent))
    return found
