"""El Che: the slowest rank sets the cadence, the others fill the same time.

The algorithm is that of flodl 0.4.0 (``el_che``): it takes a window's timings and
returns the next window's batch counts. ``ElChe`` lists the differences and reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from elche.cadence.anchor import Anchor
from elche.cadence.rank_time import RankTime
from elche.cadence.throughput import (
    HeldRatios,
    SpeedHints,
    check_int,
    check_measure,
    check_reports,
    complete_costs,
    relative_speeds,
)
from elche.errors import ConfigError

MAX_LEAST = 10**9
"""Cap on the least number of batches of a window."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ElCheConfig:
    """Settings of El Che, checked when made.

    Attributes:
        world_size: number of ranks; 1 is allowed and trivial.
        anchor: batches that the slowest rank runs in the first window; clamped to
            ``min_anchor`` to ``max_anchor``.
        min_anchor: lower limit of the auto-tune; None is the first anchor.
        max_anchor: upper limit of the anchor (staleness); 0 switches El Che off, and
            every count is 1. ``anchor=n, max_anchor=n`` fixes the anchor.
        overhead_target: largest wanted time of a synchronisation as a fraction of
            the window's; clamped to 0.01 to 0.50. The default is 0.03: with the
            reference's 0.10 a blocking run settles at 0.91 to 0.95 efficiency.
        max_batch_diff: most batches by which a rank may lead the slowest rank, and
            by which a count may change per report once calibrated; None sets no
            limit.
        speed_hints: relative speed per rank (0.4 is 40 % of the fastest rank's), used
            until a rank is measured; a mapping may omit ranks (1.0). Stored as a
            tuple of one speed per rank.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    world_size: int
    anchor: int = 10
    min_anchor: int | None = None
    max_anchor: int = 200
    overhead_target: float = 0.03
    max_batch_diff: int | None = None
    speed_hints: SpeedHints = None

    def __post_init__(self) -> None:
        check_int("world_size", self.world_size, 1)
        check_int("anchor", self.anchor, 1)
        check_int("max_anchor", self.max_anchor, 0)
        if self.min_anchor is not None:
            check_int("min_anchor", self.min_anchor, 1)
            if 0 < self.max_anchor < self.min_anchor:
                raise ConfigError(
                    f"min_anchor must be at most max_anchor ({self.max_anchor}), "
                    f"got {self.min_anchor}"
                )
        if self.max_batch_diff is not None:
            check_int("max_batch_diff", self.max_batch_diff, 0)
        if not math.isfinite(self.overhead_target):
            raise ConfigError(
                "overhead_target must be a finite fraction such as 0.03, got "
                f"{self.overhead_target!r}"
            )
        target = min(max(float(self.overhead_target), 0.01), 0.50)
        object.__setattr__(self, "overhead_target", target)
        if self.speed_hints is not None:
            speeds = relative_speeds(self.speed_hints, self.world_size)
            object.__setattr__(self, "speed_hints", speeds)


@final
class ElChe:
    """Computes batch counts per rank and window, from delivered times.

    The slowest rank, the *reference*, runs ``anchor`` batches per window, and every
    other rank as many as fit into the same time. The anchor grows in proportion when
    synchronising takes more than ``overhead_target`` of a window. It falls, half the
    way per report, when synchronising takes less than half of that.

    Differences from the reference algorithm:

    * The overhead is the median time of the last three synchronisations over the
      planned window (the smaller of the first two, nothing after the first). So a
      spike or a short last window has no effect. The anchor at most doubles per
      report; a lasting rise by a factor f is answered after 1 + ceil(log2 f) reports.
    * It falls half the way per report, and by one only while room is made (below).
      Falling by one, it took ten windows to recover from two stalls in a row; falling
      the whole way, a spike cost more than the target.
    * The reference rank is kept until another rank is 10 % slower.
    * The dead zone is on the ratio of measured times, not on the count, where
      rounding would dominate at a small anchor. It is 10 % for a fresh ratio and
      shrinks with the square root of its reports to 3 %, so that a lasting small
      error is corrected as well.
    * All counts derive from one anchor; a limit on their change
      (``max_batch_diff``) slows all ranks by the same factor, never one alone.
    * Ranks without a measurement count like the reference, or by their hint.
    * ``make_room`` sets a lower bound of the anchor in time: overlapped windows
      should not be shorter than a reduction, which has no other cost.

    Args:
        config: the settings.
        times: measured times of the ranks, read and updated; None: not measured yet.
        batch_samples: samples of a batch in these windows; 1 if batches are the unit.
    """

    def __init__(
        self,
        config: ElCheConfig,
        times: Sequence[RankTime] | None = None,
        batch_samples: int = 1,
    ) -> None:
        self._config = config
        minimum = config.anchor if config.min_anchor is None else config.min_anchor
        self._anchor = Anchor(
            config.anchor, minimum, config.max_anchor, config.overhead_target
        )
        self._speeds = relative_speeds(config.speed_hints, config.world_size)
        self._costs = [*times] if times else [RankTime(1) for _ in self._speeds]
        self._samples = batch_samples
        self._ratios = HeldRatios(self._batch_ms())
        self._counts: list[float] = []
        self._apply(limit=None)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._config.world_size

    @property
    def enabled(self) -> bool:
        """True if El Che is on; when off (``max_anchor=0``) every count is 1."""
        return self._anchor.enabled

    @property
    def anchor(self) -> int:
        """Number of batches that the slowest rank runs per window."""
        return self._anchor.value

    @property
    def max_anchor(self) -> int:
        """Upper limit of the anchor; 0 if El Che is off."""
        return self._anchor.maximum

    @property
    def min_anchor(self) -> int:
        """Lower limit of the auto-tune; a nudge may go below it."""
        return self._anchor.minimum

    @property
    def max_batch_diff(self) -> int | None:
        """Largest lead in batches over the slowest rank; None for no limit."""
        return self._config.max_batch_diff

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Number of batches of each rank in the next window, each at least 1."""
        if not self.enabled:
            return (1,) * self.world_size
        return tuple(max(1, math.floor(count + 0.5)) for count in self._counts)

    @property
    def total_batches(self) -> int:
        """Number of batches of all ranks together in the next window."""
        return sum(self.batch_counts)

    @property
    def is_calibrated(self) -> bool:
        """True if a rank has been measured."""
        return any(cost.is_measured for cost in self._costs)

    @property
    def has_speed_hint(self) -> bool:
        """True if the user's hints give the ranks different speeds."""
        return len(set(self._speeds)) > 1

    @property
    def ms_per_batch(self) -> tuple[float, ...]:
        """Smoothed delivered time per batch (ms); 0.0 if not measured."""
        return tuple(1e3 * cost.of(self._samples) for cost in self._costs)

    def _batch_ms(self) -> list[float]:
        """Returns the time per batch (ms) of every rank, measured or not."""
        return complete_costs(self.ms_per_batch, self._speeds)

    def set_batch_samples(self, samples: int) -> None:
        """Sets the number of samples per batch."""
        before, self._samples = self._samples, samples
        if self.is_calibrated and samples != before:
            self._ratios.follow(self._batch_ms())
            self._apply(limit=None)

    @property
    def anchor_wall_ms(self) -> float:
        """Planned duration of the next window (ms); 0.0 if uncalibrated."""
        if not self.is_calibrated:
            return 0.0
        return self.anchor * self._batch_ms()[self._ratios.reference]

    def batches(self, rank: int) -> int:
        """Returns a rank's number of batches in the next window.

        Raises:
            ConfigError: the rank does not exist.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank must be 0 to {self.world_size - 1}, got {rank}")
        return self.batch_counts[rank]

    def report_timing(
        self, wall_ms: Sequence[float], actual_batches: Sequence[int], sync_ms: float
    ) -> None:
        """Records the timings of a finished window and plans the next window.

        A rank that ran no batch or reports no time keeps its estimate. A report in
        which no rank measured anything changes nothing. ``sync_ms == 0`` (not measured,
        or no rank to wait for) leaves the anchor.

        Args:
            wall_ms: delivered time (ms) of each rank for its batches: waiting for data,
                transfer and compute, without the wait for other ranks.
            actual_batches: number of batches that each rank ran, planned or not.
            sync_ms: time of the synchronisation (ms).

        Raises:
            ConfigError: a time is negative or not finite, a number of batches negative,
                or a length not ``world_size``; nothing has changed then.
        """
        reports = check_reports(
            "actual_batches", actual_batches, "wall_ms", wall_ms, self.world_size
        )
        check_measure("sync_ms", sync_ms)
        if not reports:
            return
        limit = self._config.max_batch_diff if self.is_calibrated else None
        newcomer = any(not self._costs[rank].is_measured for rank, _, _ in reports)
        for rank, batches, spent_ms in reports:
            self._costs[rank].observe(self._samples, spent_ms / batches / 1e3)
        costs = self._batch_ms()
        if newcomer:
            self._ratios = HeldRatios(costs)
        else:
            self._ratios.follow(costs)
        if sync_ms > 0.0:
            self._anchor.observe_sync(sync_ms, costs[self._ratios.reference])
        self._apply(limit)

    def make_room(self, least_ms: float) -> None:
        """Makes windows last at least ``least_ms``, as far as ``max_anchor`` allows.

        For overlapped reductions: a window shorter than the previous window's reduction
        would wait for it. The anchor rises at once, not report by report, and the
        auto-tune keeps it there until the next call. If it was raised far above the
        present request, as after a pause of the link, it falls at once. It then falls
        to the request, or to its value before the raise, whichever is more. Before a
        rank is measured, nothing changes.

        Args:
            least_ms: shortest duration (ms), not negative.

        Raises:
            ConfigError: the time is negative or not finite.
        """
        check_measure("least_ms", least_ms)
        if not self.is_calibrated:
            return
        batch_ms = self._batch_ms()[self._ratios.reference]
        least = min(math.ceil(least_ms / batch_ms - _ROUNDING), MAX_LEAST)
        if self._anchor.make_room(max(1, least)):
            self._apply(self._config.max_batch_diff)

    def nudge_anchor_down(self, factor: float) -> None:
        """Shortens the windows at once, because replicas diverge.

        The anchor may fall below ``min_anchor``, down to 1. The auto-tune raises it
        again when such frequent synchronising costs more than the target.

        Args:
            factor: factor to multiply the anchor by; clamped to 0.1 to 1.0.

        Raises:
            ConfigError: the factor is not finite.
        """
        if not math.isfinite(factor):
            raise ConfigError(f"factor must be finite, such as 0.5, got {factor!r}")
        if self._anchor.nudge_down(factor):
            self._apply(limit=None)

    def clamp_total(self, max_total: int) -> tuple[int, ...]:
        """Returns the counts of a window, limited to the rest of an epoch.

        Args:
            max_total: number of batches that are left for all ranks together.

        Returns:
            ``batch_counts`` if they fit; else counts in the same proportions (largest
            remainders, the lower rank first) with the sum ``max_total``. A count may be
            0.

        Raises:
            ConfigError: ``max_total`` is negative or no integer.
        """
        limit = check_int("max_total", max_total, 0)
        counts = self.batch_counts
        total = sum(counts)
        if total <= limit:
            return counts
        clamped = [count * limit // total for count in counts]
        by_remainder = sorted(
            range(len(counts)), key=lambda rank: -(counts[rank] * limit % total)
        )
        for rank in by_remainder[: limit - sum(clamped)]:
            clamped[rank] += 1
        return tuple(clamped)

    def resized(
        self, kept: Sequence[int | None], times: Sequence[RankTime] | None = None
    ) -> ElChe:
        """Returns El Che for another membership, keeping measurements of staying ranks.

        Args:
            kept: for each new rank index the present one, None for a new rank.
            times: measured times of the new ranks; None: not measured.
        """
        speeds = tuple(1.0 if old is None else self._speeds[old] for old in kept)
        config = replace(self._config, world_size=len(kept), speed_hints=speeds)
        fresh = times or [RankTime(1) for _ in kept]
        costs = [
            new if old is None else self._costs[old]
            for old, new in zip(kept, fresh, strict=True)
        ]
        other = ElChe(config, costs, self._samples)
        other._anchor = self._anchor.without_room()
        other._apply(limit=None)
        return other

    def _apply(self, limit: int | None) -> None:
        """Moves the real-valued counts to the plan, by at most ``limit`` each.

        If real values move by at most ``limit``, so do the rounded integers.
        """
        wanted = [self._anchor.value * ratio for ratio in self._ratios.values]
        if limit is not None:
            moves = [new - old for new, old in zip(wanted, self._counts, strict=True)]
            largest = max(abs(move) for move in moves)
            if largest > limit:
                part = limit / largest
                wanted = [
                    old + part * move
                    for old, move in zip(self._counts, moves, strict=True)
                ]
        self._counts = wanted
