"""Speeds of all ranks: hints, costs that complete them, ratios held steady."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from elche.errors import ConfigError

MAX_SPEED_RATIO = 1e6
"""Ranks further apart than this are scheduled as if exactly this far apart."""
TIME_RANGE = (1e-30, 1e30)
"""Shorter than this per unit of work is no measurement, longer is refused."""
DEAD_ZONE = 0.10
"""A fresh ratio is replaced when the measured one is further away than this."""
DEAD_ZONE_FLOOR = 0.03
"""Least dead zone of a long-held ratio."""
DOMINANCE_MARGIN = 0.10
"""Margin by which a rank must be slower than the reference to become it."""

SpeedHints: TypeAlias = Mapping[int, float] | Sequence[float] | None


@final
class HeldRatios:
    """Speed of each rank over the slowest rank's, with a dead zone.

    The slowest rank is the *reference*, of ratio 1. It keeps its place until
    another rank is 10 % slower, so near-equal ranks do not take turns. A ratio is
    replaced when the measured one leaves its dead zone: 10 % when fresh, less
    with the square root of the reports that it held, 3 % at last.

    Args:
        costs: time per unit of work of each rank, positive; taken as they are.
    """

    __slots__ = ("_held", "_reference", "_values")

    def __init__(self, costs: Sequence[float]) -> None:
        self._reference = _slowest(costs)
        self._values = [costs[self._reference] / cost for cost in costs]
        self._held = [1] * len(costs)

    @property
    def reference(self) -> int:
        """The rank that counts as the slowest; of equal ones the lowest."""
        return self._reference

    @property
    def values(self) -> tuple[float, ...]:
        """Speed of each rank over the reference's."""
        return tuple(self._values)

    def follow(self, costs: Sequence[float]) -> None:
        """Adopts what left its dead zone; every ratio has the same reference."""
        slowest = _slowest(costs)
        if costs[slowest] > (1.0 + DOMINANCE_MARGIN) * costs[self._reference]:
            self._reference = slowest
        base = self._values[self._reference]
        for rank, cost in enumerate(costs):
            kept = self._values[rank] / base
            measured = costs[self._reference] / cost
            band = max(DEAD_ZONE / math.sqrt(self._held[rank]), DEAD_ZONE_FLOOR)
            leaves = abs(measured - kept) > band * kept
            self._values[rank] = measured if leaves else kept
            self._held[rank] = 1 if leaves else self._held[rank] + 1


def _slowest(costs: Sequence[float]) -> int:
    return max(range(len(costs)), key=costs.__getitem__)


def relative_speeds(hints: SpeedHints, world_size: int) -> tuple[float, ...]:
    """Speeds of all ranks relative to the fastest one, from a user's hints.

    Args:
        hints: speed per rank, 0.4 being 40 % of a rank with 1.0. A mapping may
            leave ranks out, they count as 1.0; a sequence names every rank;
            None makes all ranks equal.
        world_size: number of ranks.

    Returns:
        One speed per rank, the fastest having 1.0.

    Raises:
        ConfigError: a hint is not positive and finite, names a rank that does
            not exist, or a sequence has another length than ``world_size``.
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
            f"{len(hints)}; use a mapping from rank to speed to leave some out"
        )
    for rank, speed in items:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"speed_hints names rank {rank}, but ranks are 0 to {world_size - 1}"
            )
        if not (math.isfinite(speed) and speed > 0.0):
            raise ConfigError(
                f"speed_hints of rank {rank} must be positive and finite, got "
                f"{speed!r}; write 0.4 for a rank of 40 % of the fastest one's speed"
            )
        speeds[rank] = float(speed)
    fastest = max(speeds)
    return tuple(max(speed / fastest, 1.0 / MAX_SPEED_RATIO) for speed in speeds)


def complete_costs(measured: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Costs of all ranks, those not measured yet filled in from their hints.

    A rank without a measurement costs ``k / speed``, with the largest ``k`` that
    a measured rank shows: without hints it counts as the slowest measured one,
    so that nobody waits for a stranger. Without any measurement ``k`` is 1.

    Args:
        measured: of each rank; 0.0 where there is no measurement.
        speeds: relative speed per rank, from ``relative_speeds``.

    Returns:
        One positive cost per rank, none more than ``MAX_SPEED_RATIO`` times the
        cheapest.
    """
    pairs = [*zip(measured, speeds, strict=True)]
    scale = max((cost * speed for cost, speed in pairs if cost), default=1.0)
    costs = [cost or scale / speed for cost, speed in pairs]
    cheapest = min(costs)
    return [min(cost, cheapest * MAX_SPEED_RATIO) for cost in costs]


def check_int(name: str, value: int, minimum: int) -> int:
    """Returns ``value`` as an int, or says what it should have been.

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
    """Returns ``value`` as a float, if it can have been measured.

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
    """Reads one report of all ranks, before anything is changed by it.

    Args:
        work_name: how the work is called in a message.
        work: units of work that each rank finished.
        time_name: how the times are called in a message.
        times: delivered time of each rank for that work.
        world_size: number of ranks.

    Returns:
        ``(rank, work, time)`` of the ranks that measured something: those with
        no work or no time are left out.

    Raises:
        ConfigError: a length is not ``world_size``, an amount of work is no
            integer or negative, a time negative, not finite or absurd; the message
            names the rank.
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
            raise ConfigError(f"{time_name} of rank {rank} is no time: {spent!r}")
        if done > 0 and spent / done > TIME_RANGE[0]:
            found.append((rank, done, spent))
    return found
