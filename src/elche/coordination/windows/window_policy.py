"""``cadence`` and ``async``: windows, and their reductions.

A window opens for every rank with a length; each rank closes it at the batch boundary
nearest to the deadline. When all have closed it, the reduction is planned from their
actual work. The window is committed when all ranks hold its result. Under ``async``
ranks train on meanwhile: a rank that has closed trains for its next window. The length
of that window counts from the last close, so that all end it together. It closes only
after the last result is adopted, so at most one reduction is in flight. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

from elche.cadence.rank_time import RankTimes
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import WHOLE_BATCHES, BatchCut, BatchSizes
from elche.coordination.accounts.metrics import RankReport
from elche.coordination.policy import EpochTotals, Member, Outcome, Policy
from elche.coordination.protocol.events import (
    BatchesDone,
    EpochCut,
    EpochLeft,
    Event,
    ModelUpdated,
    WindowClosed,
)
from elche.coordination.protocol.instructions import Instruction
from elche.coordination.protocol.messages import Runs
from elche.coordination.windows.reductions import ReductionPlanner
from elche.coordination.windows.window_book import check_claim
from elche.coordination.windows.window_closing import (
    begin_reduction,
    judge_update,
    refuse_lost,
    resume_reduction,
)
from elche.coordination.windows.window_opening import (
    calibrate,
    close_idle,
    lease,
    next_window,
    open_windows,
    permits,
)
from elche.coordination.windows.window_state import WindowState
from elche.errors import ProtocolError


class WindowPolicy(Policy):
    """Policy of windows and their reductions.

    Args:
        config: the run's settings.
        members: all ranks, in order.
        epochs: number of epochs if known; decides whether outer momentum pays.
        idle: ranks that get no work, since they cost more time than they save.
        first_window: number of the first window; results are identified by it.
        cut_for: returns the cut of global batches into local ones for the ranks in the
            run; None: no cut.
        times: measured times of the ranks, read and updated; None: not measured yet.
        progress_samples: samples that the run trained under another policy.

    Attributes:
        state: state of the epoch.
    """

    def __init__(
        self,
        config: RunConfig,
        members: Sequence[Member],
        epochs: int | None,
        idle: frozenset[int] = frozenset(),
        first_window: int = 0,
        cut_for: Callable[[Collection[int]], BatchCut] | None = None,
        *,
        times: RankTimes | None = None,
        progress_samples: int = 0,
    ) -> None:
        self._cut_for = cut_for
        self.name = config.policy
        self.state = WindowState(config, members, idle, first_window, times)
        self.state.progress_samples = progress_samples
        self._planner = ReductionPlanner(config, epochs)

    @property
    def cut(self) -> BatchCut:  # type: ignore[override]
        """Division of global batches into local ones, for the present ranks."""
        make = self._cut_for
        return WHOLE_BATCHES if make is None else make(self.state.members)

    @property
    def is_outdated(self) -> bool:
        """True if batches were cut for other ranks than the present ones."""
        state = self.state
        return state.mean_over != state.parts_of(state.ledger.sizes.cut_by(self.cut))

    @property
    def first_window(self) -> int:
        """Number of the next window."""
        return self.state.book.window

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Opens the epoch's first window with its first leases."""
        state, sizes = self.state, sizes.cut_by(self.cut)
        state.reset(sizes, epoch, now_s)
        state.take_plan(sizes)
        ranks = list(state.members)
        replies = open_windows(state, ranks)
        if state.plans is None:
            replies += state.leasing.first(ranks, now_s)
        return self._outcome(replies, close_idle(state, ranks))

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Handles an event of the current epoch."""
        match event:
            case BatchesDone():
                return self._outcome(self._batches_done(event, now_s))
            case WindowClosed():
                return self._closed(event, now_s)
            case ModelUpdated():
                return self._reduced(event, now_s)
            case EpochLeft():
                return self._outcome(self._leave(event))
            case EpochCut():
                self.state.life.cut()
                return self._outcome(self._drain())
        raise ProtocolError(
            f"{self.state.config.policy}: unexpected {type(event).__name__}"
        )

    def check(self) -> None:
        """Asserts the invariants of the ledger and the window."""
        state = self.state
        state.ledger.check()
        assert state.totals.samples == state.ledger.used_samples
        for rank in state.members:
            part = state.book.part(rank)
            if not state.life.is_final:
                assert part.batches == state.ledger.trained(rank), f"rank {rank}"
            if part.permitted is not None:
                assert part.batches <= part.permitted, f"rank {rank} leads"

    @property
    def totals(self) -> EpochTotals:
        """Totals of the current epoch, or the last one."""
        return self.state.totals

    @property
    def positions_left(self) -> Runs:
        """Untrained positions of an epoch that was cut or left early."""
        return self.state.ledger.positions_left()

    def has_left(self, rank: int) -> bool:
        """True if a rank's loop has left the epoch early."""
        return rank in self.state.life.left

    def waiting_for(self) -> str:
        """Names the ranks that have not closed, or not reduced, the window."""
        state = self.state
        if state.is_paused:
            return "the remaining ranks to form a new group"
        if state.running is not None and not state.book.any_closed:
            return f"the reduction on ranks {sorted(state.running.missing)[:8]}"
        late = [r for r, part in state.book.parts.items() if part.closed is None]
        window = state.book.window
        return f"ranks {late[:8]} to end window {window} of epoch {state.epoch}"

    def remove(self, rank: int) -> None:
        """Removes a lost rank; starts nothing until :meth:`regrouped`."""
        self.state.remove(rank)

    def add(self, member: Member, *, is_idle: bool = False) -> None:
        """Adds a rank before an epoch, or the rest of one, begins."""
        self.state.add(member, is_idle=is_idle)

    def regrouped(self, reduced: Mapping[int, int], now_s: float) -> Outcome:
        """Resumes after the members' regroup; ``reduced``: results that they hold."""
        state = self.state
        replies = [*resume_reduction(state, reduced)]
        if state.may_end_window:
            return self._end_window(replies, now_s)
        if state.life.is_final and state.has_work:
            state.life.reopen()
            replies += next_window(state, now_s)
        replies += permits(state)  # the slowest rank may be lost
        return self._outcome(replies, lease(state, sorted(state.leasing.hungry), now_s))

    def _outcome(
        self, *replies: Iterable[Instruction], epoch_over: bool = False
    ) -> Outcome:
        instructions = [*chain(*replies)]
        return Outcome(instructions, epoch_over, self.state.take_notes())

    def _batches_done(self, event: BatchesDone, now_s: float) -> list[Instruction]:
        state, rank = self.state, event.rank
        if event.epoch != state.epoch:
            raise ProtocolError(
                f"rank {rank} reports batches of epoch {event.epoch}, but the "
                f"current epoch is {state.epoch}"
            )
        check_claim(event, state.ledger.train(rank, event.start, event.stop))
        state.book.trained(event)
        state.totals.add(
            event.window,
            RankReport(
                rank=rank,
                samples=event.samples,
                busy_s=event.busy_s,
                data_wait_s=event.data_wait_s,
                transfer_s=event.transfer_s,
            ),
        )
        state.leasing.trained(rank, now_s)
        replies: list[Instruction] = []
        if state.throttle.done(rank, state.book.batches_since(rank)):
            replies += permits(state)
        if event.timed:
            replies += calibrate(state, rank)
        return replies + lease(state, [rank], now_s)

    def _closed(self, event: WindowClosed, now_s: float) -> Outcome:
        state, rank = self.state, event.rank
        was_first = not state.book.any_closed
        state.book.close(event)
        state.ledger.close(rank)
        if event.scalars:
            state.totals.add(event.window, RankReport(rank=rank, scalars=event.scalars))
        part = state.book.parts[rank]
        judge_update(state, event)
        if state.life.is_draining and (part.is_drained or not state.is_overlapped):
            state.give_back(rank)
        if not state.continues(rank):
            state.throttle.stop(rank)
        replies = calibrate(state, rank)
        if state.may_end_window:
            return self._end_window(replies, now_s)
        if state.opens_early:
            replies += open_windows(state, [rank])
        touched = set(state.leasing.hungry) if was_first else set()
        if state.throttle.is_final:
            touched.update(state.members)
        replies += close_idle(state, sorted({*touched, rank}))
        return self._outcome(replies)

    def _end_window(self, replies: list[Instruction], now_s: float) -> Outcome:
        """Measures and reduces a window that all ranks have closed; opens the next."""
        state = self.state
        touched, ahead = (
            any(part.batches for part in parts.values())
            for parts in (state.book.parts, state.book.ahead)
        )
        is_last = not state.has_work and not ahead
        # A planned window's result is adopted in the next window.
        follows = state.is_overlapped and state.plans is not None and touched
        if is_last and not follows:
            state.life.end()
        if not touched and (state.life.is_final or not state.is_overlapped):
            state.advance()
            if state.life.is_final:
                return self._end_epoch(replies, now_s)
            return self._outcome(replies, next_window(state, now_s))
        is_tail = state.life.is_final or state.ledger.pooled == 0
        if state.plans is None:  # a plan does not depend on measurements
            state.note(
                state.pacing.measure(
                    state.book.parts, state.last, is_tail=is_tail, idle=state.idle
                )
            )
        replies += begin_reduction(state, self._planner, now_s)
        state.stage()
        state.advance()
        if not state.life.is_final:
            replies += next_window(state, now_s)
        return self._outcome(replies)

    def _reduced(self, event: ModelUpdated, now_s: float) -> Outcome:
        """Records that a rank has the result; commits the window after the last."""
        state, running = self.state, self.state.running
        if running is None:
            raise ProtocolError(f"rank {event.rank} reduced no window {event.window}")
        if running.begun_s is not None and not running.reports:
            taken_s = now_s - running.begun_s
            if event.adopted_at:  # it came while the last of these batches ran
                taken_s -= 0.5 * state.pacing.batch_s().get(event.rank, 0.0)
            state.note(state.pacing.took(max(event.sync_s, taken_s)))
        running.reduced(event)
        state.totals.add(
            event.window,
            RankReport(
                rank=event.rank,
                sync_wait_s=event.sync_s + event.wait_s,
                late_batches=event.adopted_at,
                divergence=event.divergence,
                parameter_norm=event.parameter_norm or None,
            ),
        )
        refuse_lost(state, running, event)
        if running.missing or state.is_paused:
            return self._outcome()
        return self._commit(now_s)

    def _commit(self, now_s: float) -> Outcome:
        """Commits a window whose result all ranks hold, and continues."""
        state, done = self.state, self.state.commit()
        reader = min(state.members)
        sync_s = max(report.sync_s for report in done.reports.values())
        closed = state.totals.close_window(done.plan.window, now_s, reader, sync_s)
        replies: list[Instruction] = [closed]
        if state.plans is None:
            unpaced, parts = state.idle | done.diverged, done.parts.items()
            active = [p.batches for r, p in parts if p.batches and r not in unpaced]
            state.note(state.pacing.watch(done, min(active, default=0)))
        if state.life.is_final:
            return self._end_epoch(replies, now_s)
        if state.may_end_window:  # closed before the result was adopted
            return self._end_window(replies, now_s)
        return self._outcome(replies)

    def _leave(self, event: EpochLeft) -> list[Instruction]:
        """Handles a loop's early exit: the epoch ends for all with a last commit."""
        state = self.state
        if event.epoch != state.epoch:
            raise ProtocolError(f"rank {event.rank} cannot leave epoch {event.epoch}")
        state.life.leave(event.rank)
        returned, untouched = state.give_back(event.rank)
        state.note(
            f"rank {event.rank} left the loop of epoch {event.epoch} early: the epoch "
            f"ends on all ranks; {returned} batches leased to it return to the pool, "
            f"and {untouched} unleased batches are not trained in this epoch"
        )
        return self._drain()

    def _drain(self) -> list[Instruction]:
        """Stops leasing, so that all ranks close their windows."""
        self.state.book.reopen_closing()
        return close_idle(self.state, self.state.members)

    def _end_epoch(self, replies: list[Instruction], now_s: float) -> Outcome:
        state = self.state
        anchor, ranks = state.pacing.el_che.anchor, sorted(state.members)
        ends = state.totals.end_epoch(ranks, now_s, anchor=anchor)
        return self._outcome(replies, ends, epoch_over=True)
