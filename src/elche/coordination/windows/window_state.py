"""State of an epoch under the window policies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import final

from elche.cadence.rank_time import RankTimes
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes, Range
from elche.coordination.accounts.copy_updates import CopySamples
from elche.coordination.accounts.ledger import EpochLedger
from elche.coordination.accounts.model_checks import ModelChecks
from elche.coordination.policy import EpochTotals, Member
from elche.coordination.windows.leasing import MAX_AHEAD, Leasing
from elche.coordination.windows.pacing import Pace, Pacing
from elche.coordination.windows.reductions import Reduction
from elche.coordination.windows.window_book import Throttle, WindowBook
from elche.errors import TransitionError


@dataclass(slots=True)
class EpochLife:
    """Phase of an epoch of windows; other transitions are refused.

    =========  =============  =======================================================
    call       from           when
    =========  =============  =======================================================
    ``leave``  not final      a rank's loop has left early: the epoch drains
    ``cut``    any            the epoch must pause, unless it ends: it drains
    ``end``    not final      a window has ended, and no work is left
    ``reopen``  final          a rank lost in the last reduction has left work
    =========  =============  =======================================================

    Attributes:
        is_draining: no batches are leased any more, and the epoch ends early.
        is_final: whether the last window has ended.
        left: ranks whose loops have left early.
    """

    is_draining: bool = False
    is_final: bool = False
    left: set[int] = field(default_factory=set)

    def leave(self, rank: int) -> None:
        """Records that a rank's loop has left early."""
        self._refuse(self.is_final, f"rank {rank} cannot leave its loop")
        self.is_draining = True
        self.left.add(rank)

    def cut(self) -> None:
        """Drains the epoch for a pause, unless it is ending anyway."""
        self.is_draining |= not self.is_final

    def end(self) -> None:
        """Records that the last window has ended."""
        self._refuse(self.is_final, "a window cannot be the last one")
        self.is_final = True

    def reopen(self) -> None:
        """Continues after a window that was not the last: there is work again."""
        self._refuse(not self.is_final, "an epoch cannot continue")
        self.is_final = False

    def _refuse(self, is_wrong: bool, refusal: str) -> None:
        if is_wrong:
            raise TransitionError(f"{refusal}: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Plan of one window.

    Attributes:
        parts: range of batches by rank; may be empty.
        committed_samples: as in `OpenWindow`.
        planned_samples: as in `OpenWindow`.
    """

    parts: dict[int, Range]
    committed_samples: int
    planned_samples: int

    def batches(self, rank: int) -> int:
        """Returns a rank's number of batches."""
        start, stop = self.parts[rank]
        return stop - start


@final
@dataclass(slots=True)
class FixedWindows:
    """Windows with fixed batch counts, for ``deterministic=True``.

    They do not depend on time, so two runs on the same devices give equal bits.

    Attributes:
        sizes: the epoch's batch sizes.
        ranks: the members, in order.
        counts: batches per rank and window.
        committed_samples: samples of the run before this epoch.
        first_window: number of the epoch's first window in the run.
        leased: number of windows whose batches have been leased.
    """

    sizes: BatchSizes
    ranks: Sequence[int]
    counts: Sequence[int]
    committed_samples: int
    first_window: int
    leased: int = 0

    def window(self, number: int) -> WindowPlan:
        """Returns a window's plan; beyond the epoch's end no rank has a batch."""
        end = self.sizes.num_batches
        first = min(end, (number - self.first_window) * sum(self.counts))
        bounds = [min(end, at) for at in accumulate(self.counts, initial=first)]
        return WindowPlan(
            parts=dict(zip(self.ranks, pairwise(bounds), strict=True)),
            committed_samples=self.committed_samples + self.sizes.samples_in(0, first),
            planned_samples=self.sizes.samples_in(first, bounds[-1]),
        )

    def lease_next(self) -> WindowPlan | None:
        """Returns the next window to lease batches of; None at the end."""
        plan = self.window(self.unleased)
        if not plan.planned_samples:
            return None
        self.leased += 1
        return plan

    @property
    def unleased(self) -> int:
        """First window whose batches have not been leased."""
        return self.first_window + self.leased


class WindowState:
    """Members, ledger, book and plans of one run's windows.

    Each component is written only by itself and by this class.

    Args:
        config: the run's settings.
        members: all ranks, in order.
        idle: ranks that get no work.
        first_window: number of the first window.
        times: measured times of the ranks, read and updated; None: not measured yet.

    Attributes:
        is_paused: the membership has changed; nothing starts until all members have
            formed the new group, in any phase of the epoch.
        mean_over: number of ranks that batches are cut for; see `Reduce`.
        diverged: batches of each rank since its last update, if that was not finite.
        running: the reduction in flight, at most one.
        last: last reduction whose result all ranks hold.
        uncalibrated: ranks to measure before windows have a length.
        progress_samples: samples of the run that are committed or reduced.
    """

    def __init__(
        self,
        config: RunConfig,
        members: Sequence[Member],
        idle: frozenset[int] = frozenset(),
        first_window: int = 0,
        times: RankTimes | None = None,
    ) -> None:
        self.config = config
        self.idle = idle
        self.is_overlapped = config.policy == "async"
        self.members = {member.rank: member for member in members}
        known = None
        if times is not None:  # windows are not paced by idle ranks
            known = RankTimes()
            known.update((r, times[r]) for r in self.members if r not in idle)
        self.pacing = Pacing(
            config, list(self.members), overlapped=self.is_overlapped, times=known
        )
        self.diverged: dict[int, list[Range]] = {}
        self.progress_samples = 0
        self._planned_samples = 0
        self.copies = CopySamples()
        self.book = WindowBook((), first_window)
        self._notes: list[str] = []
        self.reset(BatchSizes(()), -1, 0.0)

    def reset(self, sizes: BatchSizes, epoch: int, now_s: float) -> None:
        """Resets the state for an epoch."""
        self.epoch = epoch
        self.mean_over = self.parts_of(sizes)
        self.ledger = EpochLedger(sizes, self.members)
        self.checks = ModelChecks(f"after window {{at}} of epoch {epoch}")
        self.totals = EpochTotals(epoch, max(self.members, default=0) + 1, now_s)
        self.life = EpochLife()
        self.pacing.begin_epoch(sizes)
        self.is_paused = False
        self.running: Reduction | None = None
        self.last: Reduction | None = None
        self._last_pace: tuple[int, Pace | None] = (-1, None)
        self._paced: tuple[Pace | None, int] = (None, 0)
        self.diverged = {rank: [] for rank in self.diverged}
        self.uncalibrated = set(self.members) if self.pacing.must_calibrate else set()
        self.plans: FixedWindows | None = None
        self.book = WindowBook(self.members, self.book.window)
        most_ahead = self.config.windows.max_batch_diff
        self.throttle = Throttle(most_ahead, self.members)
        working = self.members.items()
        self.leasing = Leasing(
            self.ledger,
            {r: each.horizon_batches for r, each in working if r not in self.idle},
            epoch,
            now_s,
            MAX_AHEAD if most_ahead is None else most_ahead,
        )
        self.leasing.set_costs(self.pacing.batch_s())

    def parts_of(self, sizes: BatchSizes) -> int:
        """Returns the number of ranks a global batch is cut for: its local batches.

        At least the number of ranks with work; exactly that if the user has set the
        local batch size.
        """
        working = len(self.members.keys() - self.idle)
        if self.config.windows.local_batch_size is not None:
            return working
        return max(working, *(sizes.cut.parts_of(run[0]) for run in sizes.runs), 0)

    def take_plan(self, sizes: BatchSizes) -> None:
        """Plans fixed windows from the settings alone if the run is deterministic."""
        if self.config.debug.deterministic:
            self.uncalibrated.clear()
            self.plans = FixedWindows(
                sizes=sizes,
                ranks=sorted(self.members),
                counts=self.pacing.el_che.batch_counts,
                committed_samples=self.progress_samples,
                first_window=self.book.window,
            )

    def planned(self, window: int) -> WindowPlan | None:
        """Returns the plan of a window; None without a plan."""
        return None if self.plans is None else self.plans.window(window)

    def begin(self, reduction: Reduction) -> Reduction:
        """Starts the reduction of a window that all ranks have closed.

        Raises:
            TransitionError: the last reduction is still running.
        """
        if self.running is not None:
            raise TransitionError(
                f"window {reduction.plan.window} cannot be reduced: window "
                f"{self.running.plan.window} is"
            )
        self.running = reduction
        return reduction

    def stage(self) -> None:
        """Moves the window's batches into the reduction that begins."""
        self.progress_samples += self.ledger.stage()
        self._planned_samples = 0

    def unstage_gone(self, running: Reduction) -> None:
        """Removes lost ranks' parts from a reduction that is repeated."""
        for rank, samples in self.ledger.unstage_gone().items():
            self.progress_samples -= samples
            self.totals.discard(running.plan.window, rank, samples)
        parts = running.parts.items()
        running.parts = {r: part for r, part in parts if r in self.members}

    def commit(self) -> Reduction:
        """Commits the reduction whose result all ranks hold.

        Raises:
            TransitionError: some ranks lack the result, or nothing is reduced.
            MismatchError: ranks hold different models.
        """
        done = self.running
        if done is None or done.missing:
            raise TransitionError("a reduction is committed before all hold its result")
        self.running, self.last = None, done
        self.checks.compare({r: each.checks for r, each in done.reports.items()})
        self.ledger.commit()
        return done

    def remove(self, rank: int) -> None:
        """Removes a lost rank: its leases and uncommitted batches are pooled again.

        Its samples since the last reduction began are in no model.
        """
        self.is_paused = True
        del self.members[rank]
        self.idle -= {rank}
        if self.idle.issuperset(self.members):  # only excluded ranks remain
            idle, self.idle = self.idle, frozenset()
            for other in sorted(idle.intersection(self.members)):
                self.leasing.add(other, self.members[other].horizon_batches)
        if self.running is not None:
            self.running.remove(rank)
        self.ledger.remove(rank)
        for window, parts in enumerate((self.book.parts, self.book.ahead)):
            self.totals.discard(self.book.window + window, rank, parts[rank].samples)
        self.leasing.remove(rank)
        self.book.remove(rank)
        self.throttle.remove(rank)
        self._repace()
        self.uncalibrated.discard(rank)
        self.diverged.pop(rank, None)
        if self.life.is_draining:
            self.ledger.abandon()

    def add(self, member: Member, *, is_idle: bool) -> None:
        """Adds a rank, which takes part from the next epoch or part of one."""
        self.members[member.rank] = member
        if is_idle:
            self.idle |= {member.rank}
        self._repace()
        self.reset(self.ledger.sizes, self.epoch, 0.0)

    def _repace(self) -> None:
        self.pacing.change(sorted(self.members))
        self._last_pace = -1, None

    def note(self, text: str) -> None:
        """Saves a decision for the story."""
        if text:
            self._notes.append(text)

    def take_notes(self) -> list[str]:
        """Returns the decisions since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def pace(self, window: int) -> Pace:
        """Returns a window's length: planned, usual, or to the epoch's end.

        The first rank that enters the window fixes the length for all.
        """
        if plan := self.planned(window):
            return Pace(None, None, {rank: plan.batches(rank) for rank in plan.parts})
        if self._last_pace[0] != window:
            last = self.pacing.last_pace(self.leasing.work_s)
            self._last_pace = window, None if self.life.is_draining else last
        return self._last_pace[1] or self.pacing.pace()

    def samples_of(self, window: int, pace: Pace) -> tuple[int, int]:
        """Returns the run's samples before a window, and those planned in it.

        They are summed once and so are the same for all ranks. Samples before it are
        committed, reduced, or planned in the window before.
        """
        if plan := self.planned(window):
            return plan.committed_samples, plan.planned_samples
        if self._paced[0] is not pace:
            batches = (n for r, n in pace.batches.items() if r not in self.idle)
            count = min(sum(batches), self.ledger.sizes.num_batches)
            self._paced = pace, self.ledger.sizes.samples_in(0, count)
        planned = self._paced[1]
        if window > self.book.window:
            return self.progress_samples + self._planned_samples, planned
        self._planned_samples = planned
        return self.progress_samples, planned

    @property
    def has_work(self) -> bool:
        """True if any of the epoch's batches is not trained on yet."""
        return bool(self.ledger.total_leased or self.ledger.pooled)

    @property
    def may_end_window(self) -> bool:
        """True if all ranks have closed the window and no reduction is in flight."""
        return self.running is None and not self.is_paused and self.book.all_closed

    @property
    def opens_early(self) -> bool:
        """True if a rank may begin its next window before all have ended this one."""
        is_known = self.pacing.el_che.is_calibrated or self.plans is not None
        return self.is_overlapped and is_known

    def continues(self, rank: int) -> bool:
        """True if a rank that has ended its window trains in the next one."""
        return self.opens_early and self.ledger.leased(rank) > 0

    def advance(self) -> None:
        """Begins the next window."""
        self.book.advance()
        self.throttle = Throttle(self.config.windows.max_batch_diff, self.members)
        for rank in self.members:
            self.throttle.done(rank, self.book.batches_since(rank))
            if self.book.parts[rank].closed is not None and not self.continues(rank):
                self.throttle.stop(rank)

    def give_back(self, rank: int) -> tuple[int, int]:
        """Returns a leaver's leases to the pool, and stops all leasing.

        Returns:
            Number of returned batches, and of batches that no rank will train.
        """
        returned = self.ledger.give_back(rank)
        untouched = self.ledger.abandon()
        self.leasing.returned(rank)
        return returned, untouched
