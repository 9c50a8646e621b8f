"""Window lengths: feeds El Che with the ranks' reports. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median_low

from elche.cadence.divergence import DivergenceGuard
from elche.cadence.el_che import ElChe, ElCheConfig
from elche.cadence.overlapped import ROOM, BatchTimes, anchor_for, best_anchor
from elche.cadence.rank_time import RankTimes
from elche.cadence.window import ALIGNED_RANKS, aligned_anchor
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.windows.reductions import Reduction
from elche.coordination.windows.window_book import Part

WAIT_TOLERANCE = 0.01
"""Waits of ranks up to this fraction of a window do not lengthen the next windows."""
PATIENT_BATCHES = 12.0
"""Patience for an overlapped average, in batches of the slowest rank.

The average may arrive until the end of the next window, or until this many batches
after the end of its own window, whichever is later. So one long batch of a rank does
not delay the others at once.
"""
REDUCTIONS_KEPT = 3
"""Number of latest overlapped reductions in the median time."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Length of the next window.

    Attributes:
        wall_s: length (s); None while the window is counted in batches.
        patience_s: time (s) after which a rank blocks on the last result, None for the
            window's end. Until a reduction has been measured, it is the longest
            window.
        batches: planned batches per rank.
    """

    wall_s: float | None
    patience_s: float | None
    batches: Mapping[int, int]


class Pacing:
    """El Che, alignment and divergence guard of one run."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Sequence[int],
        *,
        overlapped: bool,
        times: RankTimes | None = None,
    ) -> None:
        self._config = config
        self._counts_samples = times is not None  # shared with other policies
        self._times = RankTimes(recent=1) if times is None else times
        self.ranks = list(ranks)
        self._overlapped = overlapped
        self._guard = DivergenceGuard() if config.windows.guard else None
        self._may_grow = True
        self._kept = [deque[float](maxlen=REDUCTIONS_KEPT) for _ in range(4)]
        self._taken_s, self._blocking_s, self._held_s, self._late_batches = self._kept
        self._pace: Pace | None = None
        given = config.windows
        self._is_fixed = given.anchor >= given.max_anchor
        lowest = max(1, given.max_anchor if self._is_fixed else given.min_anchor)
        self.el_che = ElChe(
            ElCheConfig(
                world_size=len(self.ranks),
                anchor=given.anchor,
                min_anchor=min(lowest, max(given.max_anchor, 1)),
                max_anchor=given.max_anchor,
                overhead_target=given.overhead_target,
                max_batch_diff=given.max_batch_diff,
                speed_hints=config.speed_hints,
            ),
            [self._times[rank] for rank in self.ranks],
        )

    @property
    def must_calibrate(self) -> bool:
        """True if windows need the ranks' speeds and none is known."""
        el_che = self.el_che
        return el_che.enabled and not (el_che.is_calibrated or el_che.has_speed_hint)

    def begin_epoch(self, sizes: BatchSizes) -> None:
        """Adapts the plan to the batch sizes of an epoch."""
        if self._counts_samples:
            self._pace = None
            local = (sizes.cut.largest_of(samples) for samples, _ in sizes.runs)
            self.el_che.set_batch_samples(max(local, default=1))

    def batch_s(self) -> dict[int, float]:
        """Returns each rank's delivered time (s) per batch; 0.0 if not measured."""
        costs = self.el_che.ms_per_batch
        return {r: ms / 1e3 for r, ms in zip(self.ranks, costs, strict=True)}

    def change(self, ranks: Sequence[int]) -> None:
        """Adapts the plan to a new membership."""
        self._pace = None
        for measured in self._kept:
            measured.clear()
        old = {rank: at for at, rank in enumerate(self.ranks)}
        self.el_che = self.el_che.resized(
            [old.get(rank) for rank in ranks], [self._times[rank] for rank in ranks]
        )
        self.ranks = list(ranks)

    def measure(
        self,
        parts: Mapping[int, Part],
        last: Reduction | None,
        *,
        is_tail: bool,
        idle: frozenset[int] = frozenset(),
    ) -> str:
        """Feeds El Che with the delivered times of a closed window.

        Beside its batches, a window costs the reduction, and the wait at its end that
        whole batches do not explain. An epoch's last window measures neither. The wait
        of a diverged rank does not count.

        Args:
            parts: each rank's work in the window.
            last: the reduction before it, if there was one.
            is_tail: whether the window is the last of its epoch, or shortened.
            idle: ranks that do not pace windows, whatever work they did.

        Returns:
            The change of the anchor as text, or "".
        """
        self._pace = None
        before, sync_s = self.el_che.anchor, 0.0
        if last and not (is_tail or last.diverged) and self._may_grow:
            window_s = self.el_che.anchor_wall_ms / 1e3
            busy = [r for r, part in parts.items() if part.batches and r not in idle]
            cost_s, wait_s = last.cost_s(busy)
            self._blocking_s.append(cost_s)
            self._note_adoption(last, cost_s, idle)
            sync_s = cost_s + max(0.0, wait_s - WAIT_TOLERANCE * window_s)
        ordered = [Part() if rank in idle else parts[rank] for rank in self.ranks]
        self.el_che.report_timing(
            [part.timed_s * 1e3 for part in ordered],
            [part.timed for part in ordered],
            sync_s * 1e3,
        )
        if room := self._make_room():
            return room
        if self.el_che.anchor == before:
            return ""
        return (
            f"anchor {before} -> {self.el_che.anchor}: a synchronisation costs "
            f"{sync_s * 1e3:.1f} ms of a window of {self.el_che.anchor_wall_ms:.0f} ms"
        )

    @property
    def measured_sync_s(self) -> float:
        """Time (s) of a reduction, overlapped or not; 0.0 before any is measured."""
        taken_s = self._taken_s or self._blocking_s
        return median_low(taken_s) if taken_s else 0.0

    @property
    def reduction_s(self) -> float | None:
        """Time (s) of an overlapped reduction: the median of the last three.

        Of two, the smaller one, so that a spike has no effect. None if there was none.
        """
        return median_low(self._taken_s) if self._taken_s else None

    def took(self, reduction_s: float) -> str:
        """Records a reduction's time, from the last rank's close to the first adoption.

        Overlapped windows become at least as long as a reduction, and as the best
        length by `elche.cadence.overlapped`. Returns the change as text, or "".
        """
        self._taken_s.append(reduction_s)
        return self._make_room()

    def _make_room(self) -> str:
        """Raises the anchor to a reduction's length, or to the best length."""
        before, taken_s = self.el_che.anchor, self.reduction_s
        if taken_s is None or not self._may_grow:
            return ""
        needed_s, why = ROOM * taken_s, f"a reduction takes {taken_s:.3g} s"
        if (best_s := self._best_s(taken_s)) > needed_s:
            needed_s = best_s
            why = (
                f"each window costs {median_low(self._held_s) * 1e3:.1f} ms, and its "
                f"average comes {median_low(self._late_batches):.0f} batches late"
            )
        self.el_che.make_room(needed_s * 1e3)
        if self.el_che.anchor == before:
            return ""
        self._pace = None
        return f"anchor {before} -> {self.el_che.anchor}: {why}"

    def _note_adoption(self, last: Reduction, held_s: float, idle: Set[int]) -> None:
        """Records a reduction's cost, and the fastest rank's delay in batches."""
        costs = zip(self.el_che.ms_per_batch, self.ranks, strict=True)
        working = [(ms, rank) for ms, rank in costs if ms > 0.0 and rank not in idle]
        report = last.reports.get(min(working)[1]) if working else None
        if self._overlapped and report is not None:
            self._held_s.append(held_s)
            self._late_batches.append(float(report.adopted_at))

    def _best_s(self, taken_s: float) -> float:
        """Returns the best length (s) of overlapped windows.

        0.0 while unknown, and if it is no longer than a reduction needs.
        """
        batch_s = [ms / 1e3 for ms in self.el_che.ms_per_batch if ms > 0.0]
        most = self.el_che.max_anchor
        if not self._late_batches or len(batch_s) < 2 or most < 1:
            return 0.0
        late_s = median_low(self._late_batches) * min(batch_s)
        times = BatchTimes.of(batch_s)
        held_s, least = median_low(self._held_s), anchor_for(times, taken_s)
        best = best_anchor(times, held_s, late_s, most, least=least)
        return best * self._slowest_s if best > least else 0.0

    def watch(self, reduction: Reduction, batches: int) -> str:
        """Passes a reduction's divergences to the guard, before El Che may grow.

        ``batches`` is the slowest rank's number in the window. Returns the change as
        text, or "".
        """
        if self._guard is None:
            return ""
        reports = sorted(reduction.reports.items())
        divergences = [report.divergence for _, report in reports]
        verdict = self._guard.observe(divergences, max(1, batches))
        self._may_grow = not verdict.hold
        if verdict.nudge is None:
            return ""
        self._pace = None
        before = self.el_che.anchor
        self.el_che.nudge_anchor_down(verdict.nudge)
        return f"anchor {before} -> {self.el_che.anchor}: {verdict.reason}"

    def pace(self) -> Pace:
        """Returns the next window's length: in wall time once speeds are known.

        Unless the user fixed the anchor, it may grow to one at which whole batches of
        all ranks end together.
        """
        if self._pace is None:
            self._pace = self._plan()
        return self._pace

    def last_pace(self, left_s: float) -> Pace | None:
        """Returns the next window's pace if it must last to the epoch's end, else None.

        That is the case if the work after it is too short to hide its reduction: the
        epoch's end would then wait for two reductions. Only for overlapped windows,
        within the anchor's limit. The rest of the epoch lasts ``left_s``.
        """
        pace, taken_s = self.pace(), self.reduction_s
        if not self._overlapped or taken_s is None or pace.wall_s is None:
            return None
        slowest_s = self._slowest_s
        rest_s = left_s - pace.wall_s
        longest_s = self.el_che.max_anchor * slowest_s
        if rest_s >= ROOM * taken_s + slowest_s or left_s > longest_s:
            return None
        stretch = max(1.0, left_s / pace.wall_s)
        batches = {rank: round(n * stretch) for rank, n in pace.batches.items()}
        # It ends when no work is left, not by time, which may be misjudged.
        wall_s = pace.wall_s + 2.0 * left_s
        return replace(pace, wall_s=wall_s, batches=batches)

    @property
    def _slowest_s(self) -> float:
        """Time (s) of a batch on the slowest rank."""
        return self.el_che.anchor_wall_ms / 1e3 / self.el_che.anchor

    def _plan(self) -> Pace:
        el_che, wall_ms = self.el_che, self._wall_ms()
        wall_s = patience_s = None
        stretch = 1.0
        if wall_ms > 0:
            stretch, wall_s = wall_ms / el_che.anchor_wall_ms, wall_ms / 1e3
            patience_s = wall_s + max(wall_s, PATIENT_BATCHES * self._slowest_s)
            if self._overlapped and not self._taken_s:
                patience_s = max(patience_s, el_che.max_anchor * self._slowest_s)
        counts = zip(self.ranks, el_che.batch_counts, strict=True)
        return Pace(wall_s, patience_s, {r: round(n * stretch) for r, n in counts})

    def _wall_ms(self) -> float:
        el_che = self.el_che
        if not el_che.enabled or not el_che.is_calibrated:
            return 0.0
        wall_ms, costs_ms = el_che.anchor_wall_ms, el_che.ms_per_batch
        many = len(self.ranks) > ALIGNED_RANKS
        held = self._is_fixed or many or self._overlapped or not self._may_grow
        if held or not all(cost > 0 for cost in costs_ms):
            return wall_ms
        most = self._config.windows.max_anchor
        return wall_ms * aligned_anchor(el_che.anchor, costs_ms, most) / el_che.anchor
