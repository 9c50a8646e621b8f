"""State of an epoch under the window policies. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elche.cadence.rank_time import RankTimes
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.copy_updates import CopySamples
from elche.coordination.accounts.epoch_plan import FixedWindows, WindowPlan
from elche.coordination.accounts.ledger import EpochLedger
from elche.coordination.accounts.model_checks import ModelChecks
from elche.coordination.policy import EpochTotals, Member
from elche.coordination.windows.diverged_ranks import DivergedRanks
from elche.coordination.windows.epoch_life import EpochLife
from elche.coordination.windows.leasing import MAX_AHEAD, Leasing
from elche.coordination.windows.pacing import Pace, Pacing
from elche.coordination.windows.reductions import Reduction, Reductions
from elche.coordination.windows.throttle import Throttle
from elche.coordination.windows.window_book import WindowBook


class WindowState:
    """Members, ledger, book and plans of one run's windows.

    Each part is written by itself and by this class alone.

    Args:
        config: the run's settings.
        members: all ranks, in order.
        idle: ranks that are given no work.
        first_window: number of the first window.
        times: of the ranks, to go on with and to feed.

    Attributes:
        is_paused: the membership has changed: nothing begins until all members are in
            their new group, in whatever phase the epoch is.
        mean_over: ranks that the epoch's batches are cut for; see `Reduce`.
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
        overlapped, known = self.is_overlapped, None
        if times is not None:  # an idle rank is none that windows are paced by
            known = RankTimes()
            known.update((r, times[r]) for r in self.members if r not in idle)
        self.pacing = Pacing(
            config, list(self.members), overlapped=overlapped, times=known
        )
        self.epoch = -1
        self.diverged = DivergedRanks()
        self.progress_samples = 0
        self._planned_samples = 0
        self.copies = CopySamples()
        self.book = WindowBook((), first_window)
        self._notes: list[str] = []
        self.reset(BatchSizes(()), 0, 0.0)

    def reset(self, sizes: BatchSizes, epoch: int, now_s: float) -> None:
        """Begins an epoch."""
        self.epoch = epoch
        self.mean_over = self.parts_of(sizes)
        self.ledger = EpochLedger(sizes, self.members)
        self.checks = ModelChecks(f"after window {{at}} of epoch {epoch}")
        self.totals = EpochTotals(epoch, max(self.members, default=0) + 1, now_s)
        self.life = EpochLife()
        self.pacing.begin_epoch(sizes)
        self.is_paused = False
        self.reductions = Reductions()
        self._last_pace: tuple[int, Pace | None] = (-1, None)
        self._paced: tuple[Pace | None, int] = (None, 0)
        self.diverged.begin_epoch()
        self._uncalibrated = set(self.members) if self.pacing.must_calibrate else set()
        self.plans: FixedWindows | None = None
        self.book = WindowBook(self.members, self.book.window)
        self.throttle = Throttle(self.config.windows.max_batch_diff, self.members)
        most_ahead = self.config.windows.max_batch_diff
        self.leasing = Leasing(
            self.ledger,
            {
                rank: member.horizon_batches
                for rank, member in self.members.items()
                if rank not in self.idle
            },
            epoch,
            now_s,
            MAX_AHEAD if most_ahead is None else most_ahead,
        )
        self.leasing.set_costs(self.pacing.batch_s())

    def parts_of(self, sizes: BatchSizes) -> int:
        """Ranks that a global batch is cut for: as many as it has local batches.

        At least the ranks with work; just these where the user has set the local batch.
        """
        working = len(self.members.keys() - self.idle)
        if self.config.windows.local_batch_size is not None:
            return working
        return max(working, *(sizes.cut.parts_of(run[0]) for run in sizes.runs), 0)

    def take_plan(self, sizes: BatchSizes) -> None:
        """Follows a plan made from the settings alone, where one is asked for."""
        if self.config.debug.deterministic:
            self._uncalibrated.clear()
            counts = self.pacing.el_che.batch_counts
            self.plans = FixedWindows(
                sizes, counts, self.progress_samples, self.book.window
            )

    def planned(self, window: int) -> WindowPlan | None:
        """The plan of a window; None where none is followed."""
        return None if self.plans is None else self.plans.window(window)

    def start_from(self, progress_samples: int) -> None:
        """Starts after samples that the run trained on under another policy."""
        self.progress_samples = progress_samples

    def plan_samples(self, window: int, planned_samples: int) -> int:
        """Notes how many a window is planned to be of.

        Returns:
            Samples of the run before it: committed, reduced, or planned as well.
        """
        if window > self.book.window:
            return self.progress_samples + self._planned_samples
        self._planned_samples = planned_samples
        return self.progress_samples

    def stage(self) -> None:
        """The window's batches are in the reduction that begins."""
        self.progress_samples += self.ledger.stage()
        self._planned_samples = 0

    def unstage_gone(self, window: int) -> None:
        """The reduction is redone without the parts of ranks that are gone."""
        for rank, samples in self.ledger.unstage_gone().items():
            self.progress_samples -= samples
            self.totals.discard(window, rank, samples)
        self.reductions.leave_out_gone(self.members)

    @property
    def is_calibrating(self) -> bool:
        """True if windows have no length yet, until all ranks' speeds are known."""
        return bool(self._uncalibrated)

    def calibrated(self, rank: int) -> bool:
        """A rank's speed is known, or will not be; True if all others' are, now."""
        was_awaited = rank in self._uncalibrated
        self._uncalibrated.discard(rank)
        return was_awaited and not self._uncalibrated

    def remove(self, rank: int) -> None:
        """A rank is gone: its leases and what it had not committed are pooled again.

        What it trained on since the last reduction was begun is in no model.
        """
        self.is_paused = True
        del self.members[rank]
        self.idle -= {rank}
        if self.idle.issuperset(self.members):
            self._give_work_to_all()
        self.reductions.remove(rank)
        self.ledger.remove(rank)
        for window, parts in enumerate((self.book.parts, self.book.ahead)):
            self.totals.discard(self.book.window + window, rank, parts[rank].samples)
        self.leasing.remove(rank)
        self.book.remove(rank)
        self.throttle.remove(rank)
        self._repace()
        self._uncalibrated.discard(rank)
        self.diverged.remove(rank)
        if self.life.is_draining:
            self.ledger.abandon()

    def add(self, member: Member, *, is_idle: bool) -> None:
        """A rank joins; it takes part from the next epoch on, or the rest of one."""
        self.members[member.rank] = member
        if is_idle:
            self.idle |= {member.rank}
        self._repace()
        self.reset(self.ledger.sizes, self.epoch, 0.0)

    def resume(self) -> Reduction | None:
        """All members are in the new group; returns what is to be reduced in it."""
        self.is_paused = False
        if (running := self.reductions.running) is not None:
            running.again(self.members)
        return running

    def _give_work_to_all(self) -> None:
        """Gives work to ranks that got none as too slow: no others remain."""
        idle, self.idle = self.idle, frozenset()
        for rank in sorted(idle.intersection(self.members)):
            self.leasing.add(rank, self.members[rank].horizon_batches)

    def _repace(self) -> None:
        """The last pace was of other ranks."""
        self.pacing.change(sorted(self.members))
        self._last_pace = -1, None

    def place(self, rank: int) -> int:
        """Index of a rank in a plan's lists."""
        return sorted(self.members).index(rank)

    def note(self, text: str) -> None:
        """Keeps a decision for the story."""
        if text:
            self._notes.append(text)

    def take_notes(self) -> list[str]:
        """Decisions since it was last asked."""
        notes, self._notes = self._notes, []
        return notes

    def pace(self, window: int) -> Pace:
        """Length of a window: the usual one, or to the end of the epoch.

        The first rank that comes to it decides that for all.
        """
        if self._last_pace[0] != window:
            is_free = not (self.plans is not None or self.life.is_draining)
            left_s = self.leasing.work_s
            self._last_pace = window, self.pacing.last_pace(left_s) if is_free else None
        return self._last_pace[1] or self.pacing.pace()

    def samples_of(self, pace: Pace) -> int:
        """Samples of a window of this pace; summed once, it is the same for all."""
        if self._paced[0] is not pace:
            batches = (n for r, n in pace.batches.items() if r not in self.idle)
            planned = min(sum(batches), self.ledger.sizes.num_batches)
            self._paced = pace, self.ledger.sizes.samples_in(0, planned)
        return self._paced[1]

    @property
    def has_work(self) -> bool:
        """True if anything of the epoch is still to be trained on."""
        return bool(self.ledger.total_leased or self.ledger.pooled)

    @property
    def may_end_window(self) -> bool:
        """True if all ranks have closed the window, and nothing else is reduced."""
        is_free = self.reductions.running is None and not self.is_paused
        return is_free and self.book.all_closed

    @property
    def opens_early(self) -> bool:
        """True if a rank may begin its next window before all have ended this one."""
        is_known = self.pacing.el_che.is_calibrated or self.plans is not None
        return self.is_overlapped and is_known

    def goes_on(self, rank: int) -> bool:
        """True if a rank that has ended its window trains in the next one."""
        return self.opens_early and self.ledger.leased(rank) > 0

    def advance(self) -> None:
        """The next window begins."""
        self.book.advance()
        self.throttle = Throttle(self.config.windows.max_batch_diff, self.members)
        for rank in self.members:
            self.throttle.done(rank, self.book.batches_since(rank))
            if self.book.parts[rank].closed is not None and not self.goes_on(rank):
                self.throttle.stop(rank)

    def give_back(self, rank: int) -> tuple[int, int]:
        """A rank has dropped its leases, and no rank gets any more.

        Returns:
            How many batches it gave back, and how many no rank will train on.
        """
        returned = self.ledger.give_back(rank)
        untouched = self.ledger.abandon()
        self.leasing.returned(rank)
        return returned, untouched
