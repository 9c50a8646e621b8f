"""Shares of a global batch, so that all ranks finish a step together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

from elche.cadence.rank_time import RankTime
from elche.cadence.share_sizes import MAX_SIZES, ShareSizes
from elche.cadence.split import passes_of, split_for_makespan
from elche.cadence.throughput import (
    MAX_SPEED_RATIO,
    SpeedHints,
    check_int,
    check_reports,
    complete_costs,
    relative_speeds,
)
from elche.errors import ConfigError

MAX_KEPT_SIZES = 16
"""Most batch sizes with a cached split; the least recently used is dropped."""
IDLE = 0.5
"""Fraction of a step's time below which a rank's share is far too small."""
WAKE_GAIN = 0.1
"""Least gain assumed for giving more samples to a rank that mostly idles."""
TRIAL_IDLE = 0.9
"""Fraction of a step's time below which a rank's larger share is worth a trial."""
TRIAL_COST = 0.02
"""Budget of trials: fraction of the time of the steps between two trials."""
TRIAL_STEPS = 32
"""Least steps between two trials."""
MOST_TRIAL = 2.0
"""Fraction of a step by which a trial may be longer, however rare trials are."""

_Times: TypeAlias = tuple[list[float], list[float]]

WARM_UP_SIZES = 4
"""Number of sizes of a rank up to which splits follow every warm-up report."""
REBALANCE_GAIN = 0.03
"""Least predicted cut of step time that changes the split, as a fraction."""
SLACK = 0.42
"""Logarithm of a rank's slack, per relative spread and log odds that another rank ends
last. It is about a normal quantile over sqrt(2), since the difference of two times
counts.
"""
MOST_SPREAD = 0.2
"""Largest relative spread that counts."""


@final
class Balancer:
    """Sizes each rank's share of a global batch, from delivered times.

    Args:
        world_size: number of ranks.
        min_share_samples: least samples of a share that is not empty.
        speed_hints: relative speed per rank (0.4 is 40 % of the fastest rank's), used
            until a rank is measured; a mapping may omit ranks (1.0).
        max_samples: most samples that each rank's device holds at once, None if
            unknown or unlimited; ranks at the end may be omitted.
        accumulates: ranks run a share above their cap in micro-batches, so that caps
            make shares slower but do not limit them.
        times: measured times of the ranks, read and updated; None: not measured yet.

    Attributes:
        caps: most samples that each rank's device holds at once; None if unknown.
        world_size: number of ranks.

    Raises:
        ConfigError: speed_hints does not fit the ranks.
    """

    def __init__(
        self,
        world_size: int,
        *,
        min_share_samples: int = 1,
        speed_hints: SpeedHints = None,
        max_samples: Sequence[int | None] = (),
        accumulates: bool = False,
        times: Sequence[RankTime] | None = None,
    ) -> None:
        self._min_share = min_share_samples
        self._accumulates = accumulates
        self.world_size = world_size
        self._speeds = relative_speeds(speed_hints, world_size)
        self._models = [*times] if times else [RankTime() for _ in self._speeds]
        self._kept_without: dict[frozenset[int], dict[int, tuple[int, ...]]] = {}
        self._least_ranks: frozenset[int] = frozenset()
        self._tried = self._reports = 0
        self._sizes = ShareSizes([()] * world_size)
        self._excluded: frozenset[int] = frozenset()
        self._decided: set[int] = set()
        self._forget_kept()
        missing = world_size - len(max_samples)
        self.caps = [*max_samples, *[None] * missing]
        self._is_capped = any(cap is not None for cap in self.caps)

    @property
    def used_sizes(self) -> list[list[int]]:
        """Sizes that each rank's share has had."""
        return self._sizes.used

    def reuse(self, sizes: Iterable[Iterable[int]]) -> None:
        """Restores the used share sizes of each rank, after a membership change."""
        self._sizes = ShareSizes(sizes)

    @property
    def is_calibrated(self) -> bool:
        """True if a rank has been measured."""
        return any(model.is_measured for model in self._models)

    @property
    def is_warm(self) -> bool:
        """True if every measured rank has left its warm-up."""
        return all(model.is_warm or not model.is_measured for model in self._models)

    def report(self, samples: Sequence[int], busy_s: Sequence[float]) -> None:
        """Records one measured step of all ranks.

        A rank without samples or without a time keeps its model. A share that ran in
        micro-batches is recorded as one micro-batch, which has one fixed cost.

        Args:
            samples: samples of each rank in the step.
            busy_s: delivered time (s) of each rank for them: waiting for data, transfer
                and compute, without the wait for other ranks.

        Raises:
            ConfigError: a time is negative or not finite, a number of samples negative,
                or a length not ``world_size``; nothing has changed then.
        """
        reports = check_reports("samples", samples, "busy_s", busy_s, self.world_size)
        self._reports += 1
        self._decided.clear()
        for rank, done, spent_s in reports:
            passes = self._passes(rank, done) if self._is_capped else 1
            if passes > 1:
                done, spent_s = max(1, round(done / passes)), spent_s / passes
            self._models[rank].observe(done, spent_s)

    def sizes(self, batch_samples: int) -> tuple[int, ...]:
        """Splits a global batch for the shortest predicted step.

        The split of a batch size is kept until another split is predicted to save more
        than `REBALANCE_GAIN`, or to wake a rank that idles for half of the step. It
        uses few sizes (`ShareSizes`), and new ones only if they pay.
        Before measurements it is equal, or follows the hints.

        Returns:
            One size per rank, with sum ``batch_samples``. Each is at least
            ``min_share_samples``. If the batch is too small for that, the fastest ranks
            get at least ``min_share_samples`` (or the fastest all of it), the others 0.
            No size is above its rank's cap, unless the ranks accumulate.

        Raises:
            ConfigError: ``batch_samples`` is negative or no integer, or more than all
                devices hold together.
        """
        total = check_int("batch_samples", batch_samples, 0)
        if total == 0:
            return (0,) * self.world_size
        if total in self._decided and total in self._kept:
            return self._kept[total]  # no new measurement since
        self._decided.add(total)
        times = self._planned_times()
        best = self._shortest(total, times)
        kept = self._kept.pop(total, None)
        steps, self._reports = self._reports, 0
        if kept is None:
            kept = self._choices(best, times)[1]
        elif self._gain(best, kept, times) > REBALANCE_GAIN:
            follows = not self.is_warm and self._sizes.had(best) < WARM_UP_SIZES
            split = best if follows else self._of_few_sizes(best, times, steps)
            if self._gain(split, kept, times) > REBALANCE_GAIN:
                kept = split
        self._sizes.use(kept, is_guess=not self.is_warm)
        self._kept[total] = kept
        while len(self._kept) > MAX_KEPT_SIZES:
            del self._kept[next(iter(self._kept))]
        return kept

    def trial(self, batch_samples: int, steps: int) -> tuple[int, ...] | None:
        """Returns a split to run once, which measures a larger share of one rank.

        With few samples, a rank with a fixed cost looks too slow for another sample.
        Only a measurement at another size can refute this. Ranks that wait for others
        are tried in turn. A trial's share is the largest whose cost stays within the
        budget even if no part of the time is fixed.

        Args:
            batch_samples: samples of the global batch.
            steps: number of steps since the last trial.

        Returns:
            One size per rank, with sum ``batch_samples``; None if there is nothing to
            try, or if it may cost more than 2 % of the time of ``steps`` steps.
        """
        if steps < TRIAL_STEPS or not self.is_calibrated or self._least_ranks:
            return None
        kept = self.sizes(batch_samples)
        times = self._times()
        ends = self._ends(kept, times)
        longest, minimum = max(ends), self._minimum(batch_samples)
        served = [rank for rank, part in enumerate(kept) if part]
        least = self._ends([min(part, minimum) for part in kept], times)
        if max(least) >= (1.0 - REBALANCE_GAIN) * longest:
            return None  # a least share takes as long: there is nothing to gain
        most = batch_samples - minimum * (len(served) - 1)
        patient = 1.0 + TRIAL_COST * steps
        longer = min(patient, 1.0 + MOST_TRIAL)
        for rank in (*served[self._tried :], *served[: self._tried]):
            if not self._models[rank].is_measured:
                continue  # its first share is a measurement already
            part, room = kept[rank], longest / ends[rank]
            hoped = int(self._models[rank].most_samples(part, TRIAL_IDLE * room))
            hoped = min(hoped, self._room(self.caps[rank], most, minimum))
            now, later = (int(part * room * more) for more in (longer, patient))
            size = self._sizes.trial(rank, part, min(now, hoped), min(later, hoped))
            if size is not None:
                self._tried = served.index(rank) + 1
                best = self._divide(batch_samples, served, times, {rank: size})
                known, fresh = self._choices(best, times, tried=rank)
                split = known or fresh
                if self._sizes.had(split) < MAX_SIZES - 1:
                    self._sizes.use(split)
                    return split
        return None

    def assign_least(self, ranks: Iterable[int]) -> None:
        """Assigns these ranks the least share, if the others can hold the rest."""
        self._least_ranks = frozenset(ranks)
        self._forget_kept()

    def exclude(self, ranks: Iterable[int]) -> None:
        """Excludes exactly these ranks from shares from now on."""
        self._excluded = frozenset(ranks)
        self._kept = self._kept_without.setdefault(self._excluded, {})
        self._decided.clear()

    def step_s(
        self, batch_samples: int, excluded: Iterable[int], reduce_s: float = 0.0
    ) -> float:
        """Predicts the time (s) of a step without shares for these ranks.

        Infinite if the other devices cannot hold the batch. ``reduce_s``: time of
        reductions in measured steps, which a single remaining rank saves.
        """
        times, before = self._times(), self._excluded
        self._excluded = frozenset(excluded)
        try:
            ends = self._ends(self._shortest(batch_samples, times), times)
        except ConfigError:
            return math.inf
        finally:
            self._excluded = before
        last, saved_s = ends.index(max(ends)), 0.0
        # The times of micro-batches have only parts of it.
        if reduce_s and self._passes(last, batch_samples) == 1:
            saved_s = self._models[last].saved(batch_samples, reduce_s)
        return max(ends) * min(self.costs_s()) - saved_s

    def given_s(self, batch_samples: int, share: int = 0) -> list[float]:
        """Predicts the time (s) of each rank's share; 0: of its least share."""
        parts = [share or self._minimum(batch_samples)] * self.world_size
        cheapest_s = min(self.costs_s())
        return [end * cheapest_s for end in self._ends(parts, self._times())]

    def forget(self, rank: int) -> None:
        """Discards a rank's measurements; it counts as the slowest of the others."""
        self._models[rank].forget()
        pairs = zip(self._speeds, self._models, strict=True)
        known = [speed for speed, model in pairs if model.is_measured]
        least = min(known, default=1.0)  # the hint may be its former speed
        self._speeds = (*self._speeds[:rank], least, *self._speeds[rank + 1 :])
        self._kept.clear()
        self._decided.clear()

    def limit(self, rank: int, samples: int) -> None:
        """Lowers the cap of a rank's device; a cap never rises again."""
        known = self.caps[rank]
        if known is None or samples < known:
            self.caps[rank] = samples
            self._is_capped = True
            self._forget_kept()

    def costs_s(self) -> list[float]:
        """Returns each rank's time (s) per sample, measured or from its hint."""
        return complete_costs([model.cost for model in self._models], self._speeds)

    def _forget_kept(self) -> None:
        """Discards cached splits, also those with other excluded ranks."""
        self._kept = {}
        self._kept_without = {self._excluded: self._kept}
        self._decided.clear()

    def _passes(self, rank: int, samples: int) -> int:
        """Returns the number of micro-batches in which a rank runs its share."""
        return passes_of(samples, self.caps[rank] if self._accumulates else None)

    def _times(self) -> _Times:
        """Returns relative costs per sample, and fixed costs in samples.

        Knees do not change the split: below its knee, a rank's time does not depend on
        the size of its share.
        """
        costs = self.costs_s()
        cheapest = min(costs)
        relative = [min(cost / cheapest, MAX_SPEED_RATIO) for cost in costs]
        known = [model.fixed_samples for model in self._models if model.is_measured]
        usual = max(known, default=0.0)  # of ranks that are not measured
        return relative, [
            model.fixed_samples if model.is_measured else usual
            for model in self._models
        ]

    def _planned_times(self) -> _Times:
        """Returns `_times` with slack for ranks whose times scatter.

        A step takes as long as the longest of noisy times. It is shortest, on average,
        if a rank's probability of ending last is proportional to its speed: a slow rank
        saves more time per sample. Ranks of one speed get equal slack.
        """
        costs, fixed = self._times()
        ranks = [rank for rank in range(self.world_size) if rank not in self._excluded]
        if len(ranks) > 1:
            # Of whole batches: with one size, a fixed part is a guess.
            models, paces = self._models, dict[int, float]()
            for rank in ranks:
                last = models[rank].last_samples
                paces[rank] = costs[rank] * (1.0 + fixed[rank] / last if last else 1.0)
            speed = sum(1.0 / pace for pace in paces.values())
            for rank, pace in paces.items():
                spread = min(models[rank].spread, MOST_SPREAD)
                costs[rank] *= (speed * pace - 1.0) ** (SLACK * spread)
        return costs, fixed

    def _end_of(self, times: _Times) -> Callable[[int, int], float]:
        """Returns a function for the time when a rank ends a share; 0.0 if empty."""
        costs, fixed = times
        knees = [model.knee_samples for model in self._models]

        def end(rank: int, part: int) -> float:
            passes = self._passes(rank, part) if self._is_capped else 1
            full = max(part, passes * knees[rank])
            return costs[rank] * (fixed[rank] * passes + full) if part else 0.0

        return end

    def _ends(self, parts: Sequence[int], times: _Times) -> list[float]:
        return [*map(self._end_of(times), range(self.world_size), parts)]

    def _gain(self, split: Sequence[int], kept: Sequence[int], times: _Times) -> float:
        """Returns the fraction of a step saved by a split; more if it wakes a rank."""
        ends, kept_ends = self._ends(split, times), self._ends(kept, times)
        longest = max(kept_ends)
        gain = 1.0 - max(ends) / longest
        wakes = any(
            0.0 < end < IDLE * longest and more > part
            for end, more, part in zip(kept_ends, split, kept, strict=True)
        )
        return max(gain, WAKE_GAIN) if wakes and gain > 0.0 else gain

    def _of_few_sizes(
        self, best: tuple[int, ...], times: _Times, steps: int
    ) -> tuple[int, ...]:
        """Returns the best split, or one of used sizes until new sizes pay."""
        known, fresh = self._choices(best, times)
        if known is None:
            return fresh
        gain = self._gain(fresh, known, times)
        if gain <= REBALANCE_GAIN:
            return known
        is_settled = all(model.is_settled for model in self._models)
        is_worth = self._sizes.is_worth(fresh, gain, steps, is_settled)
        return fresh if is_worth else known

    def _choices(
        self, best: tuple[int, ...], times: _Times, tried: int | None = None
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """Returns splits of used and of new sizes; ``tried`` keeps its given share."""
        total = sum(best)
        minimum = self._minimum(total)
        ranges = [
            (part, part)
            if not part or rank == tried or rank in self._least_ranks
            else (minimum, self._room(self.caps[rank], total, minimum))
            for rank, part in enumerate(best)
        ]
        return self._sizes.choices(best, ranges, self._end_of(times))

    def _shortest(self, total: int, times: _Times) -> tuple[int, ...]:
        """Returns the split with the shortest predicted step."""
        minimum = self._minimum(total)
        chosen = self._serving(total, minimum, times)
        least = {rank: minimum for rank in chosen if rank in self._least_ranks}
        rest = total - minimum * len(least)
        others = [rank for rank in chosen if rank not in least]
        rooms = [self._room(self.caps[rank], rest, minimum) for rank in others]
        fits = bool(others) and sum(rooms) >= rest
        return self._divide(total, chosen, times, least if fits else {})

    def _divide(
        self, total: int, ranks: Sequence[int], times: _Times, given: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Divides the samples without a given share among the other ranks."""
        split = [given.get(rank, 0) for rank in range(self.world_size)]
        chosen = [rank for rank in ranks if rank not in given]
        costs, fixed = ([values[rank] for rank in chosen] for values in times)
        caps = [self.caps[rank] for rank in chosen] if self._is_capped else None
        rest, minimum = total - sum(split), self._minimum(total)
        parts = split_for_makespan(
            rest, costs, fixed, minimum, caps, accumulates=self._accumulates
        )
        for rank, part in zip(chosen, parts, strict=True):
            split[rank] = part
        return tuple(split)

    def _minimum(self, total: int) -> int:
        """Returns the least samples of a share that is not empty."""
        return min(self._min_share, total)

    def _room(self, cap: int | None, total: int, minimum: int) -> int:
        """Returns a rank's largest possible share; 0 if the least does not fit."""
        if cap is None:
            return total
        if cap < minimum:
            return 0
        return total if self._accumulates else min(cap, total)

    def _serving(self, total: int, minimum: int, times: _Times) -> list[int]:
        """Returns the ranks that get a share: as many as the least shares allow.

        If not all can, it picks the fastest ranks that get more than the least one, or
        if these cannot hold the batch, the ranks that hold most.
        """
        most = max(1, total // minimum)
        cost, fixed_samples = times

        def start(rank: int) -> tuple[bool, float]:
            least_s = cost[rank] * (fixed_samples[rank] + minimum)
            return rank in self._least_ranks, least_s

        every = [r for r in range(self.world_size) if r not in self._excluded]
        if not self._is_capped:
            return sorted(sorted(every, key=start)[:most])
        rooms = [self._room(cap, total, minimum) for cap in self.caps]
        able = [r for r in every if rooms[r]]

        def by_room(rank: int) -> tuple[int, tuple[bool, float]]:
            return -rooms[rank], start(rank)

        keys: list[Callable[[int], Any]] = [start, by_room]
        for key in keys:
            chosen = sorted(able, key=key)[:most]
            if sum(rooms[r] for r in chosen) >= total:
                return sorted(chosen)
        held = {r: cap for r, cap in enumerate(self.caps) if cap is not None}
        raise ConfigError(
            f"a batch of {total} samples does not fit on the devices of all ranks "
            f"together (max samples by rank: {held}, at least {minimum} each); lower "
            "batch_size, raise max_samples where a device holds more, or train with "
            "elche.Trainer, which runs a large share in micro-batches"
        )
