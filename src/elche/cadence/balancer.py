"""Shares of a global batch, so that all ranks finish a step together."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from elche.cadence.throughput import (
    MAX_SPEED_RATIO,
    SpeedHints,
    check_int,
    check_reports,
    complete_costs,
    relative_speeds,
)
from elche.cadence.time_model import TimeModel
from elche.errors import ConfigError

MAX_KEPT_SIZES = 16
"""Batch sizes whose split is held steady; the longest unused is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerConfig:
    """What the user sets of the balancer; checked when made.

    Attributes:
        world_size: number of ranks.
        min_share_samples: smallest part of a batch that a rank gets, if any.
        speed_hints: relative speed per rank (0.4 is 40 % of the fastest one's),
            used until a rank is measured; a mapping may leave ranks out (1.0).
            Kept as a tuple of one speed per rank.
        rebalance_gain: by which part the predicted time of a step must fall for
            the split to change; 0.02 is 2 %.

    Raises:
        ConfigError: a value is of the wrong kind or out of its range.
    """

    world_size: int
    min_share_samples: int = 1
    speed_hints: SpeedHints = None
    rebalance_gain: float = 0.02

    def __post_init__(self) -> None:
        check_int("world_size", self.world_size, 1)
        check_int("min_share_samples", self.min_share_samples, 1)
        if not 0.0 <= self.rebalance_gain < 1.0:
            raise ConfigError(
                "rebalance_gain must be a fraction from 0 to below 1, such as 0.02, "
                f"got {self.rebalance_gain!r}"
            )
        if self.speed_hints is not None:
            speeds = relative_speeds(self.speed_hints, self.world_size)
            object.__setattr__(self, "speed_hints", speeds)


def split_for_makespan(
    total: int, cost: Sequence[float], fixed_samples: Sequence[float], minimum: int
) -> tuple[int, ...]:
    """Integer parts that minimise ``max(cost[r] * (fixed_samples[r] + n[r]))``.

    Giving one sample after the other to the rank that would finish it first is
    optimal, as each rank's time only grows. The real-valued solution with every
    part rounded down is a state which that passes, so only the fewer than W last
    samples are given that way: O(W log W), whatever the total.

    Args:
        total: samples to distribute, at least ``minimum`` for every rank.
        cost: time per sample of each rank, positive.
        fixed_samples: fixed cost of each rank in samples, not negative.
        minimum: smallest part of a rank.

    Returns:
        One part per rank, together ``total``; of equal choices the lowest ranks.
    """
    ranks = range(len(cost))
    start = [cost[r] * (fixed_samples[r] + minimum) for r in ranks]
    order = sorted(ranks, key=start.__getitem__)
    load, rate, level = float(total - minimum * len(cost)), 0.0, 0.0
    parts = [minimum] * len(cost)
    for place, rank in enumerate(order, start=1):
        load += fixed_samples[rank] + minimum
        rate += 1.0 / cost[rank]
        level = load / rate
        if place == len(order) or level <= start[order[place]]:
            break
    for rank in order[:place]:
        parts[rank] = max(minimum, math.floor(level / cost[rank] - fixed_samples[rank]))
    while sum(parts) > total:
        late = max(
            (r for r in ranks if parts[r] > minimum),
            key=lambda r: cost[r] * (fixed_samples[r] + parts[r]),
        )
        parts[late] -= 1
    ends = [(cost[r] * (fixed_samples[r] + parts[r] + 1), r) for r in ranks]
    heapq.heapify(ends)
    for _ in range(total - sum(parts)):
        rank = ends[0][1]
        parts[rank] += 1
        end = cost[rank] * (fixed_samples[rank] + parts[rank] + 1)
        heapq.heapreplace(ends, (end, rank))
    return tuple(parts)


@final
class Balancer:
    """Sizes of each rank's part of a global batch, from delivered times.

    Args:
        config: the settings.
    """

    __slots__ = ("_config", "_kept", "_left_out", "_models", "_speeds")

    def __init__(self, config: BalancerConfig) -> None:
        self._config = config
        self._speeds = relative_speeds(config.speed_hints, config.world_size)
        self._models = [TimeModel() for _ in range(config.world_size)]
        self._kept: dict[int, tuple[int, ...]] = {}
        self._left_out: frozenset[int] = frozenset()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._config.world_size

    @property
    def is_calibrated(self) -> bool:
        """Whether a rank has been measured."""
        return any(model.cost.is_measured for model in self._models)

    def report(self, samples: Sequence[int], busy_s: Sequence[float]) -> None:
        """Takes in one measured step of all ranks.

        A rank without samples or without a time keeps its model.

        Args:
            samples: samples of each rank in the step.
            busy_s: delivered seconds of each rank for them: waiting for data,
                transfer and compute, without waiting for other ranks.

        Raises:
            ConfigError: a time is negative or not finite, a number of samples
                negative, or a length not ``world_size``; nothing has changed then.
        """
        reports = check_reports("samples", samples, "busy_s", busy_s, self.world_size)
        for rank, done, spent_s in reports:
            self._models[rank].observe(done, spent_s)

    def sizes(self, batch_samples: int) -> tuple[int, ...]:
        """Splits a global batch for the shortest predicted step.

        The split of a batch size stays until another one is predicted to be
        shorter by more than ``rebalance_gain``. Before measurements it is equal,
        or as the hints say.

        Args:
            batch_samples: samples of the global batch.

        Returns:
            One size per rank, together ``batch_samples``. Each is at least
            ``min_share_samples``; where the batch is too small for that, the
            fastest ranks get at least as much (the fastest one of all whatever
            there is) and the others 0.

        Raises:
            ConfigError: ``batch_samples`` is negative or no integer.
        """
        total = check_int("batch_samples", batch_samples, 0)
        cost, fixed_samples = self._times()
        split = self._shortest(total, cost, fixed_samples)
        kept = self._kept.pop(total, split)

        def makespan(parts: tuple[int, ...]) -> float:
            ends = zip(cost, fixed_samples, parts, strict=True)
            return max(c * (f + n) if n else 0.0 for c, f, n in ends)

        gain = self._config.rebalance_gain
        if makespan(split) >= (1.0 - gain) * makespan(kept):
            split = kept
        self._kept[total] = split
        while len(self._kept) > MAX_KEPT_SIZES:
            del self._kept[next(iter(self._kept))]
        return split

    def leave_out(self, ranks: Iterable[int]) -> None:
        """Gives these ranks no samples from now on.

        Raises:
            ConfigError: nobody would be left.
        """
        left_out = frozenset(ranks)
        if left_out >= set(range(self.world_size)):
            raise ConfigError("expected to leave out some ranks, got all of them")
        self._left_out = left_out
        self._kept.clear()

    def costs_s(self) -> tuple[list[float], list[float]]:
        """Seconds per sample, and fixed seconds per step, of each rank.

        A rank that was not measured counts as its hint says.
        """
        cost_s = complete_costs([model.cost for model in self._models], self._speeds)
        fixed = [
            cost * model.fixed_samples
            for cost, model in zip(cost_s, self._models, strict=True)
        ]
        return cost_s, fixed

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, as values that JSON keeps exactly."""
        return {
            "world_size": self.world_size,
            "models": [model.state_dict() for model in self._models],
            "kept": [list(parts) for parts in self._kept.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another instance of the same configuration was.

        Args:
            state: what ``state_dict`` returned, through JSON or not.

        Raises:
            ConfigError: the state is of another world size, lacks something or
                holds impossible values; nothing has changed then.
        """
        size = self.world_size
        if state.get("world_size") != size:
            raise ConfigError(
                f"the balancer's state is of world size {state.get('world_size')}, "
                f"this run has {size}; start without it, a few steps calibrate it"
            )
        try:
            models = [TimeModel.from_state_dict(model) for model in state["models"]]
            kept = [
                tuple(check_int("a part", part, 0) for part in parts)
                for parts in state["kept"]
            ]
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"the balancer's state cannot be read: {error!r}"
            ) from error
        if any(len(values) != size for values in (models, *kept)):
            raise ConfigError(f"the balancer's state does not describe {size} ranks")
        self._models = models
        self._kept = {sum(parts): parts for parts in kept}

    def _times(self) -> tuple[list[float], list[float]]:
        """Cost per sample relative to the cheapest, and fixed cost in samples."""
        costs = complete_costs([model.cost for model in self._models], self._speeds)
        cheapest = min(costs)
        relative = [min(cost / cheapest, MAX_SPEED_RATIO) for cost in costs]
        return relative, [model.fixed_samples for model in self._models]

    def _shortest(
        self, total: int, cost: Sequence[float], fixed_samples: Sequence[float]
    ) -> tuple[int, ...]:
        minimum = self._config.min_share_samples
        ranks = [r for r in range(self.world_size) if r not in self._left_out]
        served = max(1, min(len(ranks), total // minimum))
        minimum = min(minimum, total)
        by_speed = sorted(
            ranks,
            key=lambda r: cost[r] * (fixed_samples[r] + minimum),
        )
        chosen = sorted(by_speed[:served])
        parts = split_for_makespan(
            total,
            [cost[r] for r in chosen],
            [fixed_samples[r] for r in chosen],
            minimum,
        )
        split = [0] * self.world_size
        for rank, part in zip(chosen, parts, strict=True):
            split[rank] = part
        return tuple(split)
