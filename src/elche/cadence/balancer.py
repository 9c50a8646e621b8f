"""Shares of a global batch, so that all ranks finish a step together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from elche.cadence.split import passes_of, split_in_micro_batches
from elche.cadence.split import split_for_makespan as split_for_makespan
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
IDLE = 0.5
"""Part of a step below which a rank's time shows that its share is far too small."""
TRIAL_IDLE = 0.9
"""Part of a step below which a rank's time makes a larger share worth a trial."""
TRIAL_COST = 0.02
"""What trials may cost: part of the time of the steps between two of them."""
TRIAL_STEPS = 32
"""Fewest steps between two trials."""
MOST_TRIAL = 2.0
"""Part of a step that a trial may be longer at most, after however many steps."""

_Times: TypeAlias = tuple[list[float], list[float]]


REBALANCE_GAIN = 0.02
"""By which part the predicted time of a step must fall for the split to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerConfig:
    """What the user sets of the balancer; checked when made.

    Attributes:
        world_size: number of ranks.
        min_share_samples: smallest part of a batch that a rank gets, if any.
        speed_hints: relative speed per rank (0.4 is 40 % of the fastest one's),
            used until a rank is measured; a mapping may leave ranks out (1.0).
            Kept as a tuple of one speed per rank.
        max_samples: most samples that the device of each rank holds at once, None
            where that is not known to be limited; ranks at the end may be left out.
            Kept as a tuple of one cap per rank.
        accumulates: a rank runs a part above its cap in micro-batches, so that caps
            make parts slower but limit none.

    Raises:
        ConfigError: a value is of the wrong kind or out of its range.
    """

    world_size: int
    min_share_samples: int = 1
    speed_hints: SpeedHints = None
    max_samples: Sequence[int | None] = ()
    accumulates: bool = False

    def __post_init__(self) -> None:
        check_int("world_size", self.world_size, 1)
        check_int("min_share_samples", self.min_share_samples, 1)
        if self.speed_hints is not None:
            speeds = relative_speeds(self.speed_hints, self.world_size)
            object.__setattr__(self, "speed_hints", speeds)
        if len(self.max_samples) > self.world_size:
            raise ConfigError(
                f"max_samples must name at most {self.world_size} ranks, got "
                f"{len(self.max_samples)}"
            )
        for rank, cap in enumerate(self.max_samples):
            if cap is not None:
                check_int(f"max_samples of rank {rank}", cap, 1)
        missing = self.world_size - len(self.max_samples)
        caps = (*self.max_samples, *[None] * missing)
        object.__setattr__(self, "max_samples", caps)


@final
class Balancer:
    """Sizes of each rank's part of a global batch, from delivered times.

    Args:
        config: the settings.
    """

    __slots__ = (
        "_caps",
        "_config",
        "_is_capped",
        "_kept",
        "_models",
        "_spared",
        "_speeds",
        "_tried",
    )

    def __init__(self, config: BalancerConfig) -> None:
        self._config = config
        self._speeds = relative_speeds(config.speed_hints, config.world_size)
        self._models = [TimeModel() for _ in range(config.world_size)]
        self._kept: dict[int, tuple[int, ...]] = {}
        self._spared: frozenset[int] = frozenset()
        self._tried = 0
        self._set_caps(config.max_samples)

    @property
    def max_samples(self) -> tuple[int | None, ...]:
        """Samples that each rank's device holds at once, as far as is known."""
        return tuple(self._caps)

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

        A rank without samples or without a time keeps its model. Of a part that was
        run in micro-batches one of these is taken in, so that the fixed cost stays
        that of one.

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
            passes = self._passes(rank, done) if self._is_capped else 1
            if passes > 1:
                done, spent_s = max(1, round(done / passes)), spent_s / passes
            self._models[rank].observe(done, spent_s)

    def sizes(self, batch_samples: int) -> tuple[int, ...]:
        """Splits a global batch for the shortest predicted step.

        The split of a batch size stays until another one is predicted to be
        shorter by more than `REBALANCE_GAIN`, or gives more to a rank that is idle
        for half of the step. Before measurements it is equal, or as the hints say.

        Args:
            batch_samples: samples of the global batch.

        Returns:
            One size per rank, together ``batch_samples``. Each is at least
            ``min_share_samples``; where the batch is too small for that, the
            fastest ranks get at least as much (the fastest one of all whatever
            there is) and the others 0. None is above its rank's cap, unless the
            ranks accumulate.

        Raises:
            ConfigError: ``batch_samples`` is negative or no integer, or more than
                the devices hold together.
        """
        total = check_int("batch_samples", batch_samples, 0)
        if total == 0:
            return (0,) * self.world_size
        times = self._times()
        split = self._shortest(total, times)
        kept = self._kept.pop(total, split)
        ends, kept_ends = self._ends(split, times), self._ends(kept, times)
        longest = max(kept_ends)
        gains = max(ends) < (1.0 - REBALANCE_GAIN) * longest
        wakes = max(ends) < longest and any(
            0.0 < end < IDLE * longest and more > part
            for end, more, part in zip(kept_ends, split, kept, strict=True)
        )
        if not (gains or wakes):
            split = kept
        self._kept[total] = split
        while len(self._kept) > MAX_KEPT_SIZES:
            del self._kept[next(iter(self._kept))]
        return split

    def trial(self, batch_samples: int, steps: int) -> tuple[int, ...] | None:
        """Another split, to be run once, that shows what a larger share costs a rank.

        At a few samples a fixed cost looks like a slow rank, of which one more sample
        seems to take longer than it is worth; only another size shows that it is not.
        A rank that waits for the others is tried, each in its turn, with the most that
        costs no more than this even if nothing of its time is fixed.

        Args:
            batch_samples: samples of the global batch.
            steps: that were run since the last trial.

        Returns:
            One size per rank, together ``batch_samples``; None if there is nothing to
            try, or if it may cost more than 2 % of the time of so many steps.
        """
        if steps < TRIAL_STEPS or not self.is_calibrated or self._spared:
            return None
        kept = self.sizes(batch_samples)
        times = self._times()
        ends = self._ends(kept, times)
        longest, minimum = max(ends), self._minimum(batch_samples)
        served = [rank for rank, part in enumerate(kept) if part]
        least = self._ends([min(part, minimum) for part in kept], times)
        if max(least) >= (1.0 - REBALANCE_GAIN) * longest:
            return None  # somebody's least part takes as long: nothing is to be gained
        most = batch_samples - minimum * (len(served) - 1)
        longer = 1.0 + min(TRIAL_COST * steps, MOST_TRIAL)
        for rank in (*served[self._tried :], *served[: self._tried]):
            part, room = kept[rank], longest / ends[rank]
            more = max(part + 1, int(part * room * longer))
            hoped = int(self._models[rank].most_samples(part, TRIAL_IDLE * room))
            more = min(more, hoped, self._room(self._caps[rank], most, minimum))
            if part < more <= part * room * longer:
                self._tried = served.index(rank) + 1
                return self._divide(batch_samples, served, times, {rank: more})
        return None

    def spare(self, ranks: Iterable[int]) -> None:
        """Gives these ranks the least part from now on, if the others can do the rest.

        Raises:
            ConfigError: no rank would be left.
        """
        spared = frozenset(ranks)
        if spared >= set(range(self.world_size)):
            raise ConfigError("expected to spare some ranks, got all of them")
        self._spared = spared
        self._kept.clear()

    def limit(self, rank: int, samples: int) -> None:
        """A rank's device holds no more samples at once; a cap never rises again.

        Raises:
            ConfigError: there is no such rank, or not one sample fits.
        """
        check_int("the cap of a rank", samples, 1)
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"expected a rank below {self.world_size}, got {rank}")
        known = self._caps[rank]
        if known is None or samples < known:
            self._caps[rank] = samples
            self._is_capped = True
            self._kept.clear()

    def costs_s(self) -> list[float]:
        """Seconds per sample of each rank; where not measured, as its hint says."""
        return complete_costs([model.cost for model in self._models], self._speeds)

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, as values that JSON keeps exactly."""
        return {
            "world_size": self.world_size,
            "models": [model.state_dict() for model in self._models],
            "kept": [list(parts) for parts in self._kept.values()],
            "max_samples": list(self._caps),
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
            caps = [
                cap if cap is None else check_int("a cap", cap, 1)
                for cap in state["max_samples"]
            ]
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"the balancer's state cannot be read: {error!r}"
            ) from error
        if {size, *map(len, kept), len(models), len(caps)} != {size}:
            raise ConfigError(f"the balancer's state does not describe {size} ranks")
        self._models = models
        self._kept = {sum(parts): parts for parts in kept}
        self._set_caps(caps)

    def _set_caps(self, caps: Iterable[int | None]) -> None:
        """Also notes whether there are any: most runs need not ask each rank."""
        self._caps = list(caps)
        self._is_capped = any(cap is not None for cap in self._caps)

    def _passes(self, rank: int, samples: int) -> int:
        """In how many micro-batches a rank runs its part."""
        return passes_of(
            samples, self._caps[rank] if self._config.accumulates else None
        )

    def _times(self) -> _Times:
        """Cost per sample relative to the cheapest, and fixed cost in samples."""
        costs = complete_costs([model.cost for model in self._models], self._speeds)
        cheapest = min(costs)
        relative = [min(cost / cheapest, MAX_SPEED_RATIO) for cost in costs]
        return relative, [model.fixed_samples for model in self._models]

    def _ends(self, parts: Sequence[int], times: _Times) -> list[float]:
        """When each rank is through with its part; 0.0 without one."""
        ends = zip(*times, parts, strict=True)
        if not self._is_capped:
            return [c * (f + n) if n else 0.0 for c, f, n in ends]
        return [
            c * (f * self._passes(rank, n) + n) if n else 0.0
            for rank, (c, f, n) in enumerate(ends)
        ]

    def _shortest(self, total: int, times: _Times) -> tuple[int, ...]:
        """The split that is predicted to be done first."""
        minimum = self._minimum(total)
        chosen = self._serving(total, minimum, times)
        spared = {rank: minimum for rank in chosen if rank in self._spared}
        rest = total - minimum * len(spared)
        others = [rank for rank in chosen if rank not in spared]
        rooms = [self._room(self._caps[rank], rest, minimum) for rank in others]
        fits = bool(others) and sum(rooms) >= rest
        return self._divide(total, chosen, times, spared if fits else {})

    def _divide(
        self, total: int, ranks: Sequence[int], times: _Times, given: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Divides what the given parts leave among the others of these ranks."""
        split = [given.get(rank, 0) for rank in range(self.world_size)]
        chosen = [rank for rank in ranks if rank not in given]
        costs, fixed = ([values[rank] for rank in chosen] for values in times)
        caps = [self._caps[rank] for rank in chosen] if self._is_capped else None
        rest, minimum = total - sum(split), self._minimum(total)
        if caps is not None and self._config.accumulates:
            parts = split_in_micro_batches(rest, costs, fixed, minimum, caps)
        else:
            parts = split_for_makespan(rest, costs, fixed, minimum, caps)
        for rank, part in zip(chosen, parts, strict=True):
            split[rank] = part
        return tuple(split)

    def _minimum(self, total: int) -> int:
        """The least part of a rank that has any."""
        return min(self._config.min_share_samples, total)

    def _room(self, cap: int | None, total: int, minimum: int) -> int:
        """The largest part that a rank can have; 0 where the least one does not fit."""
        if cap is None:
            return total
        if cap < minimum:
            return 0
        return total if self._config.accumulates else min(cap, total)

    def _serving(self, total: int, minimum: int, times: _Times) -> list[int]:
        """The ranks that get a part: as many as can have the least one.

        Where they are fewer than all, the fastest that are not spared, or if these
        cannot hold the batch those that hold most.
        """
        most = max(1, total // minimum)
        cost, fixed_samples = times

        def start(rank: int) -> tuple[bool, float]:
            least_s = cost[rank] * (fixed_samples[rank] + minimum)
            return rank in self._spared, least_s

        if not self._is_capped:
            every = range(self.world_size)
            return sorted(sorted(every, key=start)[:most])
        rooms = [self._room(cap, total, minimum) for cap in self._caps]
        able = [r for r in range(self.world_size) if rooms[r]]

        def by_room(rank: int) -> tuple[int, tuple[bool, float]]:
            return -rooms[rank], start(rank)

        keys: list[Callable[[int], Any]] = [start, by_room]
        for key in keys:
            chosen = sorted(able, key=key)[:most]
            if sum(rooms[r] for r in chosen) >= total:
                return sorted(chosen)
        held = {r: cap for r, cap in enumerate(self._caps) if cap is not None}
        raise ConfigError(
            f"a batch of {total} samples does not fit the devices of all ranks "
            f"together (most samples by rank: {held}, at least {minimum} each); lower "
            "batch_size, raise max_samples where a device holds more, or train with "
            "elche.Trainer, which runs a large share in micro-batches"
        )
