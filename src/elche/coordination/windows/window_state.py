"""State of an epoch under the window policies. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes, Range
from elche.coordination.accounts.epoch_plan import (
    EpochPlan,
    FixedWindows,
    RecordedWindows,
    WindowPlan,
    WindowSource,
)
from elche.coordination.accounts.ledger import EpochLedger
from elche.coordination.policy import EpochTotals, Member
from elche.coordination.windows.leasing import MAX_AHEAD, Leasing
from elche.coordination.windows.pacing import Pace, Pacing
from elche.coordination.windows.throttle import Throttle
from elche.coordination.windows.window_book import Part, Reduction, WindowBook


class WindowState:
    """Members, ledger, book and plans of one run's windows.

    Args:
        config: the run's settings.
        members: all ranks, in order.
        idle: ranks that are given no work.
        first_window: number of the first window.
    """

    def __init__(
        self,
        config: RunConfig,
        members: Sequence[Member],
        idle: frozenset[int] = frozenset(),
        first_window: int = 0,
    ) -> None:
        self.config = config
        self.idle = idle
        self.is_overlapped = config.policy == "async"
        self.members = {member.rank: member for member in members}
        self.pacing = Pacing(config, list(self.members), overlapped=self.is_overlapped)
        self.epoch = -1
        self.diverged: dict[int, list[Range]] = {}
        self.progress_samples = 0
        self.planned_samples = 0
        self.book = WindowBook(self.members, first_window)
        self.left: set[int] = set()
        self.notes: list[str] = []
        self.reset(BatchSizes(()), 0, 0.0)

    def reset(self, sizes: BatchSizes, epoch: int, now_s: float) -> None:
        """Begins an epoch."""
        self.epoch = epoch
        self.ledger = EpochLedger(sizes, self.members)
        self.totals = EpochTotals(epoch, max(self.members, default=0) + 1, now_s)
        self.is_draining = self.is_final = self.is_paused = False
        self.left = set()
        self.reduction: Reduction | None = None
        self.last_reduction: Reduction | None = None
        self.reduced_parts: dict[int, Part] = {}
        self.reduction_settings: dict[str, object] = {}
        self.joining: list[int] = []
        self.last_pace: tuple[int, Pace | None] = (-1, None)
        self.diverged = {rank: [] for rank in self.diverged}
        self.source: WindowSource | None = None
        self.uncalibrated = set(self.members) if self.pacing.must_calibrate else set()
        self.planned_until = self.first_window = self.book.window
        self.record = EpochPlan(
            policy=self.config.policy,
            world_size=len(self.members),
            sizes=list(self.ledger.sizes.runs),
        )
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

    def take_plan(self, sizes: BatchSizes, text: str) -> None:
        """Follows a recorded plan, or one made from the settings alone."""
        if text or self.config.debug.deterministic:
            self.uncalibrated.clear()
        if text:
            self.source = RecordedWindows(
                EpochPlan.from_text(text, self.config.policy, len(self.members), sizes)
            )
        elif self.config.debug.deterministic:
            counts = self.pacing.el_che.batch_counts
            self.source = FixedWindows(sizes, counts, self.progress_samples)

    def planned(self, window: int) -> WindowPlan | None:
        """The plan of a window; an empty one past the end of a planned epoch."""
        if self.source is None:
            return None
        plan = self.source.window(window - self.first_window)
        if plan is None:
            nothing = [0] * len(self.members)
            plan = WindowPlan(
                parts=[[] for _ in nothing],
                adopt_at=nothing,
                committed_samples=self.progress_samples,
                planned_batches=nothing,
            )
        return plan

    def place(self, rank: int) -> int:
        """Where a rank stands in a plan's lists."""
        return sorted(self.members).index(rank)

    def note(self, text: str) -> None:
        """Keeps a decision for the story."""
        if text:
            self.notes.append(text)

    def pace(self, window: int) -> Pace:
        """How long a window is to be: usual, or to the end of the epoch.

        The first rank that comes to it decides that for all.
        """
        if self.last_pace[0] != window:
            is_free = self.source is None and not self.is_draining
            left_s = self.leasing.work_s
            self.last_pace = window, self.pacing.last_pace(left_s) if is_free else None
        return self.last_pace[1] or self.pacing.pace()

    @property
    def has_work(self) -> bool:
        """Whether anything of the epoch is still to be trained on."""
        return bool(self.ledger.total_leased or self.ledger.pooled)

    @property
    def may_end_window(self) -> bool:
        """Whether all ranks have closed the window, and nothing else is reduced."""
        is_free = self.reduction is None and not self.is_paused
        return is_free and self.book.all_closed

    @property
    def opens_early(self) -> bool:
        """Whether a rank may begin its next window before all have ended this one."""
        is_known = self.pacing.el_che.is_calibrated or self.source is not None
        return self.is_overlapped and is_known

    def goes_on(self, rank: int) -> bool:
        """Whether a rank that has ended its window trains in the next one."""
        return self.opens_early and self.ledger.leased(rank) > 0

    def advance(self) -> None:
        """The next window begins."""
        self.book.advance()
        self.count_anew()

    def count_anew(self) -> None:
        """The throttle counts from here on, and all who are members now."""
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
