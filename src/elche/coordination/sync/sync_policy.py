"""``sync``: every global batch divided by delivered speed, reduced at every step.

Steps are granted to all ranks alike and ahead of every rank's loader, so no rank ever
waits for a message and a change of shares names a step that no loader has drawn
yet. Early grants are one step long, so that the first measurements count
at once; later ones cover about ``GRANT_S`` seconds. The first steps of unequal devices
are granted one by one: their shares are guesses, and waiting for a message costs less
than another step that everybody waits for the slowest device in.

When a rank is gone, the others form a new group and say how many steps each has taken:
one at most is in the models of some of them only, and these hand theirs over. Every
later step that was granted is granted anew, divided among who is there. A rank that
joins does so when all granted steps are done. A rank without which steps are shorter
may be left out (`elche.coordination.sync.left_out`). Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from elche.coordination.accounts.batch_ranges import BatchSizes, Range, joined
from elche.coordination.accounts.epoch_plan import EpochPlan
from elche.coordination.accounts.ledger import EpochLedger
from elche.coordination.agreement import Settings
from elche.coordination.policy import EpochTotals, Member, Outcome, Policy
from elche.coordination.protocol.events import (
    EpochCut,
    EpochLeft,
    Event,
    PassBegun,
    StepsDone,
    WindowReduced,
)
from elche.coordination.protocol.instructions import (
    Adopt,
    GrantSteps,
    Instruction,
)
from elche.coordination.protocol.messages import Runs
from elche.coordination.sync.left_out import LeftOutRanks
from elche.coordination.sync.nonfinite import NonFiniteReports
from elche.coordination.sync.step_book import Granted, StepBook, report_of
from elche.coordination.sync.step_leaving import EarlyEnd
from elche.coordination.sync.step_reports import EARLY
from elche.coordination.sync.step_shares import StepShares
from elche.errors import ProtocolError, TransitionError

GRANT_S = 0.1
MAX_GRANT_STEPS = 64
ALL_RANKS = -1
FIRST_STEPS = 2
"""One that is not timed (compilation), and one that is."""


class SyncPolicy(Policy):
    """Grants steps and sizes the shares of each.

    Args:
        members: all ranks, in order.
        settings: what the ranks agreed on.
    """

    def __init__(self, members: Sequence[Member], settings: Settings) -> None:
        config = settings.config
        self._members = {member.rank: member.horizon_batches for member in members}
        self._world_size = max(self._members) + 1
        self._shares = StepShares(settings, self._members)
        self._left_out = LeftOutRanks(members, settings, self._shares)
        self._is_carried = False
        self._is_deterministic = config.debug.deterministic
        self._is_stopping = self._makes_room = self._is_paused = False
        self._is_cut = False
        self._step_s = math.inf
        self._epoch = -1
        self._ledger = EpochLedger(BatchSizes(()), [ALL_RANKS])
        self._totals = EpochTotals(-1, self._world_size, 0.0)
        self._record: EpochPlan | None = None
        self._planned: deque[tuple[int, int, list[int]]] | None = None
        self._grants = StepBook()
        self._granted_until = self._committed_until = 0
        self._joining: set[int] = set()
        self._behind: set[int] = set()
        self._adopting: set[int] = set()
        self._left = EarlyEnd(config.policy)
        self._lost: dict[int, int] = {}
        self._ready: set[int] = set()
        self._returned: list[Range] = []
        self._numbers = NonFiniteReports()
        self._ahead_steps = max(self._members.values()) + 2
        self._lag_steps = 0
        self._has_said_none = False
        self._is_single = False
        is_known = self._shares.is_fixed or config.speed_hints is not None
        self._guesses = not is_known and len({member.device for member in members}) > 1

    @property
    def is_elastic(self) -> bool:
        """Ranks may come and go, but not while loops leave an epoch early."""
        return not self._left

    @property
    def is_quiet(self) -> bool:
        """No step is under way; :meth:`make_room` brings that about."""
        busy = self._grants or self._is_paused or self._adopting or self._left
        return self._makes_room and not busy and self._ledger.pooled > 0

    @property
    def _active(self) -> Set[int]:
        """Members that take part in steps."""
        members = self._members.keys()
        left_out = self._left_out.ranks
        return members - set(left_out) if left_out else members

    def begin_epoch(
        self, epoch: int, sizes: BatchSizes, now_s: float, plan: str = ""
    ) -> Outcome:
        """Grants the first steps."""
        self._epoch = epoch
        world_size = self._world_size
        self._record = EpochPlan(
            policy="sync", world_size=world_size, sizes=list(sizes.runs)
        )
        self._planned = None
        if plan:
            self._guesses = False
            recorded = EpochPlan.from_text(plan, "sync", world_size, sizes)
            self._planned = deque(recorded.steps)
        self._ledger = EpochLedger(sizes, [ALL_RANKS])
        self._totals = EpochTotals(epoch, world_size, now_s)
        self._grants.clear()
        self._has_said_none = False
        self._granted_until = self._committed_until = 0
        self._is_paused = self._is_cut = False
        self._joining.clear()
        self._behind.clear()
        self._adopting.clear()
        self._lost.clear()
        self._ready.clear()
        self._returned.clear()
        self._left.clear()
        self._numbers.clear()
        told = self._left_out.begin_epoch(epoch, sizes, now_s)
        return Outcome([*told, *self._top_up()])

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Takes a report of steps, or a rank's early end of the epoch."""
        if isinstance(event, EpochLeft):
            return self._leave(event, now_s)
        if isinstance(event, EpochCut):
            self._is_cut = True
        elif isinstance(event, WindowReduced):
            self._adopted(event)
        elif isinstance(event, StepsDone):
            self._take(event)
        elif isinstance(event, PassBegun):
            is_late = event.epoch != self._epoch
            return Outcome([] if is_late else self._left.begun(event, self._active))
        else:
            raise ProtocolError(f"sync: unexpected {type(event).__name__}")
        return Outcome() if self._is_paused else self._go_on(now_s)

    def _go_on(self, now_s: float) -> Outcome:
        """Completes what all have done, grants more, and ends the epoch."""
        outcome = Outcome()
        while (oldest := self._grants.oldest) and self._is_complete(oldest):
            outcome.instructions += self._complete(self._grants.pop(), now_s)
        if self._left:
            outcome.instructions += self._say_none()
            return self._end_early(outcome, now_s)
        may_leave = self._left_out.is_leaving and not self._is_stopping
        if may_leave and self.is_drained and self._ledger.pooled:
            outcome.instructions += self._left_out.leave(now_s)
            self._is_carried = False
        outcome.instructions += self._top_up()
        is_over = self._ledger.is_done or (self._is_cut and self.is_drained)
        if is_over and not self._is_carrying(outcome):
            self._numbers.check(self._epoch, self._active, is_last=True)
            outcome.instructions += self._totals.end_epoch(
                sorted(self._members),
                now_s,
                anchor=1,
                plan=self._record.to_text() if self._record is not None else "",
            )
            outcome.epoch_over = True
        return outcome

    def _is_carrying(self, outcome: Outcome) -> bool:
        """Whether ranks left out have yet to take over the model of this epoch."""
        apart = self._behind | set(self.left_out)
        if apart and not self._is_carried:
            last, holder = self._granted_until - 1, min(self._members.keys() - apart)
            outcome.instructions += self._hand_over(holder, last)
        return bool(self._adopting)

    @property
    def totals(self) -> EpochTotals:
        """What the ranks did in the epoch under way."""
        return self._totals

    @property
    def positions_left(self) -> Runs:
        """Positions of an epoch that was cut, or left, that nobody has trained on."""
        return tuple(joined([*self._ledger.positions_left(), *self._returned]))

    @property
    def is_cut(self) -> bool:
        """Whether the epoch ends with some of it left."""
        return self._is_cut

    @property
    def steps_left(self) -> int:
        """As many steps as were not run, where ranks have died; else 0."""
        return max(1, self._ledger.pooled) if self._lost else 0

    def mortal_by(self, rank: int) -> str:
        """Why the others cannot go on without this rank; "" if they can."""
        apart = self._behind | set(self.left_out)
        if apart and not self._members.keys() - apart - {rank}:
            return f"ranks {sorted(apart)} are left out of steps, and lack the model"
        return self._left_out.mortal_by

    @property
    def granted_until(self) -> int:
        """The first step that has not been granted."""
        return self._granted_until

    @property
    def is_drained(self) -> bool:
        """Whether all ranks have run every granted step, and none has left early."""
        return not (self._grants or self._is_paused or self._adopting or self._left)

    def stop_granting(self) -> list[GrantSteps]:
        """Grants no more steps in this epoch: another policy takes over."""
        self._is_stopping = True
        return self._say_none()

    def grant_again(self) -> None:
        """From the next event or epoch on grants steps again."""
        self._is_stopping = False

    def grant_singly(self, wanted: bool) -> None:
        """Grants a step only when the last one is done, though loaders wait for it.

        Where steps are slow and may soon be given up, for what was granted ahead is
        run in any case.
        """
        self._is_single = wanted

    def leave_out(
        self, ranks: tuple[int, ...], with_s: float, without_s: float
    ) -> Sequence[Instruction]:
        """Steps are the choice; of seconds as in :meth:`LeftOutRanks.allow`."""
        return self._left_out.allow(ranks, with_s, without_s)

    def keep_all(self) -> None:
        """Windows take the place of steps: later ones are of all ranks again."""
        self._left_out.stop()

    @property
    def leaves_out(self) -> bool:
        """Whether some ranks are left out of steps, or about to be."""
        return bool(self.left_out) or self._left_out.is_leaving

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks that take no part in steps now."""
        return self._left_out.ranks

    def make_room(self, wanted: bool) -> list[Instruction]:
        """No steps are granted while somebody wants the ranks quiet."""
        was_wanted, self._makes_room = self._makes_room, wanted
        return self._top_up() if was_wanted and not wanted else []

    def spare(self, ranks: Sequence[int]) -> None:
        """Gives these ranks the least share of later steps, so that others get more."""
        self._shares.spare(ranks)

    def remove(self, rank: int) -> None:
        """A rank is gone; nothing is granted until :meth:`regrouped`."""
        self._is_paused = True
        del self._members[rank]
        self._joining.discard(rank)
        self._behind.discard(rank)
        self._ready.discard(rank)
        self._adopting.discard(rank)
        self._grants.remove(rank)
        self._follow_members()

    def add(self, member: Member) -> None:
        """A rank joins; it takes part once it holds the model."""
        self._is_paused = True
        self._members[member.rank] = member.horizon_batches
        self._world_size = max(self._world_size, member.rank + 1)
        self._joining.add(member.rank)
        self._follow_members()

    def arrived(self, rank: int, lost: Runs) -> None:
        """Before :meth:`regrouped`: a member is in the group; see `Regrouped`."""
        self._ready.discard(rank)  # in an earlier group
        self._lost.update(lost)

    def regrouped(self, reduced: Mapping[int, int], now_s: float) -> Outcome:
        """All members have formed their group; says how many steps each has taken.

        Or will have taken, without ranks that have died; then the epoch pauses,
        and what is left of it is shared out anew.

        Args:
            reduced: the last step of the epoch that is in each member's model.
            now_s: the time.
        """
        self._is_paused = False
        self._numbers.clear()
        if self._lost:
            self._settle(max(reduced.values()) + 1)
            self._is_cut = True
            self._adopting = self._members.keys() - self._ready - self._behind
            self._ready.clear()
            return self._go_on(now_s)
        held = {r: step for r, step in reduced.items() if r not in self._joining}
        if not held:
            raise TransitionError("no remaining rank holds the model")
        last = max(held.values())
        self._settle(last + 1)
        told: list[Instruction] = []
        self._adopting.clear()
        if self._joining or min(held.values()) < last:
            source = min(rank for rank, step in held.items() if step == last)
            told = self._hand_over(source, last)
        outcome = self._go_on(now_s)
        outcome.instructions[:0] = told
        return outcome

    def _settle(self, done: int) -> None:
        """So many steps are in the model that is handed on; others are granted anew."""
        self._grants.settle(done, self._lost)
        self._ledger.give_back(ALL_RANKS)
        if done > self._committed_until:
            self._ledger.lease_range(ALL_RANKS, self._committed_until, done)
        self._granted_until = done
        self._record = self._planned = None  # of another membership

    def _hand_over(self, source: int, last: int) -> list[Instruction]:
        """All take the model after the step ``last`` from one rank."""
        self._is_carried = True
        self._adopting.update(self._members)
        return [
            Adopt(rank=rank, epoch=self._epoch, window=last, source=source)
            for rank in sorted(self._members)
        ]

    def _adopted(self, event: WindowReduced) -> None:
        is_due = event.rank in self._adopting or self._is_paused
        if not is_due or event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} was to adopt nothing: {event}")
        if self._is_paused:
            self._ready.add(event.rank)  # others have yet to say that they are there
        self._adopting.discard(event.rank)
        self._joining.discard(event.rank)
        self._behind.discard(event.rank)
        if not self._lost:
            self._left_out.carried(event.sync_s)

    def _follow_members(self) -> None:
        self._ahead_steps = max(self._members.values()) + 2
        self._shares.follow(self._members)
        behind = set(self._left_out.reset(sorted(self._members)))
        behind &= self._adopting if self._is_carried else self._members.keys()
        self._joining |= behind
        self._behind |= behind

    def check(self) -> None:
        """Asserts that every step is in one place, and who owes what."""
        self._ledger.check()
        if not self._left:
            returned = sum(stop - start for start, stop in self._returned)
            assert self._totals.samples == self._ledger.used_samples - returned
        assert self._joining | self._adopting <= self._members.keys()
        oldest = self._grants.oldest
        if oldest is not None:
            assert oldest.start == self._committed_until
            silent = self._grants.silent(self._members)
            assert oldest.is_settled or len(silent) == oldest.missing, oldest

    def has_left(self, rank: int) -> bool:
        """Whether a rank's loop has left the epoch early."""
        return rank in self._left

    def waiting_for(self) -> str:
        """Ranks that have not reported the oldest grant, or not left the epoch."""
        if self._is_paused:
            return "the ranks that stay to form their new group"
        if self._adopting:
            what = "run the steps begun" if self._lost else "take over the model"
            return f"ranks {sorted(self._adopting)} to {what}"
        silent = self._grants.silent(self._members)
        return f"steps of ranks {silent} in epoch {self._epoch}"

    def _take(self, event: StepsDone) -> None:
        if event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} reports steps it was not granted")
        self._grants.take(event)
        self._numbers.take(event)
        self._numbers.check(event.epoch, self._active, is_last=False)
        self._left_out.see(event)
        self._lag_steps = int(self._lag_steps or event.unknown == EARLY)
        self._shares.limit(event.rank, event.max_samples)

    def _is_complete(self, grant: Granted) -> bool:
        if grant.is_settled:
            return not self._adopting
        return not grant.missing and bool(grant.reports)

    def _complete(self, grant: Granted, now_s: float) -> list[Instruction]:
        """All ranks have run the oldest grant: measure and commit it."""
        self._ledger.train(ALL_RANKS, grant.start, grant.stop)
        self._ledger.close(ALL_RANKS)
        self._ledger.stage()
        self._ledger.commit()
        self._committed_until = grant.stop
        for work in grant.work():
            self._totals.add(grant.stop - 1, work)
        for step, start, stop in grant.missing_parts():
            first = self._ledger.sizes.position_of(step)
            self._returned.append((first + start, first + stop))
        self._guesses &= grant.stop < FIRST_STEPS
        self._left_out.completed()
        reports = [grant.reports[rank] for rank in sorted(grant.reports)]
        told: list[Instruction] = []
        if not (grant.is_settled or grant.left):
            told += self._measure(grant, reports)
        sync_s = max((report.sync_wait_s for report in reports), default=0.0)
        first, last, steps = min(self._members), grant.stop - 1, grant.steps
        return [*told, self._totals.close_window(last, now_s, first, sync_s, steps)]

    def _measure(
        self, grant: Granted, reports: Sequence[StepsDone]
    ) -> Sequence[Instruction]:
        """Takes in what steps of all who take part took.

        Raises:
            ProtocolError: they ran different numbers of backward passes.
        """
        passes = [report.backward_passes for report in reports]
        if len(set(passes)) > 1:
            raise ProtocolError(
                f"ranks ran different numbers of backward passes up to step "
                f"{grant.stop - 1}: {passes}; {self._left.under} a batch may only be "
                "skipped on every rank, because their gradients are summed step by step"
            )
        if not all(report.warm for report in reports) or self._is_deterministic:
            return []
        steps = grant.steps
        self._shares.measured(reports, steps)
        self._step_s = max(report.busy_s for report in reports) / steps
        return self._left_out.measured(reports, steps, self._ledger.pooled)

    def _top_up(self) -> list[Instruction]:
        """Grants steps until the loaders' horizon and two grants are covered."""
        instructions: list[Instruction] = []
        steps = 1
        if self._step_s > 0 and math.isfinite(self._step_s):
            steps = min(MAX_GRANT_STEPS, max(1, math.ceil(GRANT_S / self._step_s)))
        left_out = self._left_out
        is_single = self._is_single or self._guesses or left_out.is_trying
        steps = 1 if left_out.is_trying or self._is_single else steps
        holds = self._is_stopping or self._makes_room or self._is_paused
        holds |= self._is_cut or bool(self._left)
        if holds:
            return [*self._say_none()]
        while self._ledger.pooled and not left_out.is_leaving:
            ahead = self._ledger.leased(ALL_RANKS)
            under_way = self._grants.oldest
            oldest = under_way.steps if under_way is not None else 1
            most = self._ahead_steps + (oldest - 1) + (steps - 1)
            if ahead >= (1 if is_single else most) + self._lag_steps:
                break
            start, stop, shares = self._next_steps(steps)
            if self._record is not None:
                self._record.steps.append((start, stop, list(shares)))
            self._granted_until, self._has_said_none = stop, False
            first = GrantSteps(
                rank=0, epoch=self._epoch, start=start, stop=stop, shares=shares
            )
            ranks = sorted(self._active)
            instructions += [replace(first, rank=rank) for rank in ranks]
            self._grants.grant(start, stop, shares, len(ranks), left_out.ranks)
        return instructions

    def _say_none(self) -> list[GrantSteps]:
        """Tells loops that fetch early that none are granted for now.

        Else they would wait for a grant to report their last step, and it for them.
        """
        waits = self._grants and self._ledger.pooled and not self._lost
        if not (self._lag_steps and waits) or self._has_said_none:
            return []
        self._has_said_none, at = True, self._granted_until
        return [
            GrantSteps(rank=rank, epoch=self._epoch, start=at, stop=at, shares=())
            for rank in sorted(self._active)
        ]

    def _next_steps(self, most: int) -> tuple[int, int, tuple[int, ...]]:
        """The next steps and their shares: as planned, or as speeds are now."""
        if self._planned:
            start, stop, planned = self._planned.popleft()
            self._ledger.lease_range(ALL_RANKS, start, stop)
            return start, stop, tuple(planned)
        samples, _ = self._ledger.sizes.run_of(self._granted_until)
        granted = self._ledger.leased(ALL_RANKS)
        trial = self._shares.trial(samples, self._world_size, granted)
        if trial is not None:
            most = 1
        start, stop = self._ledger.lease(ALL_RANKS, most, equal_sizes=True)
        return start, stop, trial or self._shares.of(samples, self._world_size)

    def _leave(self, event: EpochLeft, now_s: float) -> Outcome:
        """A loop's early end: granted steps are run, and no others are granted."""
        if event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} leaves epoch {event.epoch}")
        if self._is_paused or self._adopting:
            raise ProtocolError(
                f"rank {event.rank} left epoch {event.epoch} while ranks that live "
                f"formed another group; {event.apart}"
            )
        self._grants.check_part(event)
        told = self._left.take(event, self._active)
        self._grants.leave(event.rank)
        self._numbers.take(event)
        self._totals.add(max(0, event.step - 1), report_of(event))
        outcome = self._go_on(now_s)
        outcome.instructions[:0] = told
        return outcome

    def _end_early(self, outcome: Outcome, now_s: float) -> Outcome:
        """Ends the epoch when whoever stayed has run what was granted."""
        active = self._active
        staying = self._left.staying(active)
        if (staying and self._grants) or self._adopting:
            return outcome
        if staying and self._lag_steps:
            raise ProtocolError(
                f"ranks {sorted(active - {*staying})} left epoch {self._epoch} before "
                f"ranks {staying}, whose last backward pass is to come, because "
                f"{EARLY}; leave it after the same step on every rank"
            )
        done = self._granted_until if staying else self._left.step
        source = self._left.settle(active, is_needed=bool(self._left_out.ranks))
        if source is not None:
            outcome.instructions += self._hand_over(source, done - 1)
            return outcome
        self._numbers.check(self._epoch, active, is_last=True)
        ranks, steps = sorted(self._members), done - self._committed_until
        if steps > 0:
            part = self._totals.close_window(done - 1, now_s, ranks[0], 0.0, steps)
            outcome.instructions.append(part)
        outcome.instructions += self._totals.end_epoch(ranks, now_s, anchor=1, plan="")
        outcome.epoch_over = True
        return outcome
