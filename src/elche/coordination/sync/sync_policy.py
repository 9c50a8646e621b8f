"""``sync``: divides every global batch by delivered speed, reduces at every step.

Steps are granted ahead (`elche.coordination.sync.step_grants`), reported by all ranks,
and then committed. After a rank's death the others form a new group and agree on the
steps that they run without it (`elche.coordination.sync.lost_ranks`). Then the epoch
pauses, and its rest is divided among the survivors. A rank without which steps are
shorter may be excluded (`elche.coordination.sync.left_out`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from elche.cadence.rank_time import RankTimes
from elche.coordination.accounts.batch_ranges import BatchSizes, Range, joined
from elche.coordination.accounts.model_checks import ModelChecks
from elche.coordination.agreement import Settings
from elche.coordination.fatal_losses import LossLimits
from elche.coordination.policy import EpochTotals, Member, Outcome, Policy
from elche.coordination.protocol.events import (
    EpochCut,
    EpochLeft,
    Event,
    ModelUpdated,
    PassBegun,
    StepsDone,
)
from elche.coordination.protocol.instructions import GrantBatches, Instruction
from elche.coordination.protocol.messages import Runs
from elche.coordination.sync.left_out import ExcludedRanks
from elche.coordination.sync.model_handover import ModelHandover
from elche.coordination.sync.nonfinite import NonFiniteReports
from elche.coordination.sync.step_grants import Granted, StepGrants, report_of
from elche.coordination.sync.step_leaving import SAME_PASSES, EarlyEnd
from elche.coordination.sync.step_reports import EARLY
from elche.coordination.sync.step_shares import StepShares
from elche.errors import ConfigError, ProtocolError


class SyncPolicy(Policy):
    """Policy that grants steps and sizes each rank's shares of them.

    Args:
        members: all ranks, in order.
        settings: the settings that the ranks agreed on.
        times: measured times of the ranks, read and updated; None: not measured yet.

    Attributes:
        watch: called with each grant's reports and number of steps before more are
            granted; its instructions are sent.
        shares: the members' shares of each step.
        exclusion: members excluded from steps.
        grants: the steps of the epoch.
        is_cut: this part of the epoch ends after its granted steps.
    """

    watch: Callable[[Sequence[StepsDone], int], list[Instruction]] | None = None

    def __init__(
        self,
        members: Sequence[Member],
        settings: Settings,
        times: RankTimes | None = None,
    ) -> None:
        config = settings.config
        self._members = {member.rank: member.horizon_batches for member in members}
        self.shares = StepShares(settings, self._members, times)
        self.exclusion = ExcludedRanks([*self._members], settings, self.shares)
        self.grants = StepGrants(members, settings, self.shares, self.exclusion)
        self._is_deterministic = config.debug.deterministic
        self._makes_room = False
        self._policy = config.policy
        self._begin(-1, 0.0)

    def _begin(self, epoch: int, now_s: float) -> None:
        """Resets the state for an epoch."""
        self._epoch = epoch
        self._is_paused = self.is_cut = False
        self._handover = ModelHandover(epoch)
        self._totals = EpochTotals(epoch, self.grants.world_size, now_s)
        self._checks = ModelChecks(f"after step {{at}} of epoch {epoch}")
        self._left = EarlyEnd(self._policy)
        self._numbers = NonFiniteReports()
        self._lost: dict[int, int] = {}
        self._returned: list[Range] = []

    @property
    def _active(self) -> Set[int]:
        """Members that take part in steps."""
        return self._members.keys() - self._handover.behind

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Grants the first steps."""
        self.grants.begin_epoch(epoch, sizes)
        self._begin(epoch, now_s)
        replies = self.exclusion.begin_epoch(epoch, sizes, now_s)
        return Outcome([*replies, *self._top_up()])

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Handles a report of steps, or a rank's early exit from the epoch."""
        match event:
            case EpochLeft():
                return self._leave(event, now_s)
            case PassBegun():
                is_late = event.epoch != self._epoch
                return Outcome([] if is_late else self._left.begun(event, self._active))
            case EpochCut():
                self.is_cut = True
            case ModelUpdated():
                self._handover.take(event, is_paused=self._is_paused)
                if not self._lost:
                    self.exclusion.carrying_s = event.sync_s
            case StepsDone():
                self._take(event)
            case _:
                raise ProtocolError(f"sync: unexpected {type(event).__name__}")
        return Outcome() if self._is_paused else self._advance(now_s)

    def _advance(self, now_s: float) -> Outcome:
        """Completes steps that all ranks have run, grants more, and ends the epoch."""
        outcome = Outcome()
        grants = self.grants
        while (oldest := grants.oldest) and self._is_complete(oldest):
            outcome.instructions += self._complete(grants.complete(), now_s)
        if self._left:
            outcome.instructions += self._top_up()
            return self._end_early(outcome, now_s)
        exclusion = self.exclusion
        if exclusion.is_trial_due:
            self.is_cut = True
        copies = grants.ungranted or exclusion.final or exclusion.is_uneven
        if exclusion.is_leaving and self.is_drained and copies:
            outcome.instructions += exclusion.leave()
            self._handover.behind.update(exclusion.ranks)
        outcome.instructions += self._top_up()
        is_done = not (grants or grants.ungranted)
        is_over = is_done or (self.is_cut and self.is_drained)
        if is_over and not self._is_carrying(outcome):
            self._end(outcome, now_s)
        return outcome

    def _end(self, outcome: Outcome, now_s: float) -> None:
        self._numbers.check(self._epoch, self._active, is_last=True)
        ranks = sorted(self._members)
        outcome.instructions += self._totals.end_epoch(ranks, now_s, anchor=1)
        outcome.epoch_over = True

    def _is_carrying(self, outcome: Outcome) -> bool:
        """True if excluded ranks have not copied this epoch's model yet."""
        handover = self._handover
        if handover.is_due and not handover.adopting:
            source, last = min(self._active), self.grants.until - 1
            outcome.instructions += handover.instruct(self._members, source, last)
        return bool(handover.adopting)

    @property
    def totals(self) -> EpochTotals:
        """Totals of the current epoch."""
        return self._totals

    @property
    def positions_left(self) -> Runs:
        """Untrained positions of an epoch that was cut or left."""
        return tuple(joined([*self.grants.positions_left, *self._returned]))

    @property
    def steps_left(self) -> int:
        """Steps that were not run because ranks have died; else 0."""
        return max(1, self.grants.ungranted) if self._lost else 0

    @property
    def loss_limits(self) -> LossLimits:
        """Losses that end the run: sole holders of the model, and changing groups."""
        is_sole = bool(self._handover.behind) and len(self._active) == 1
        return LossLimits(
            sole_holders=self._active if is_sole else frozenset(),
            changing=self.exclusion.changing,
            stale=self.exclusion.final,
            has_breaks=bool(self._left),
        )

    @property
    def is_drained(self) -> bool:
        """True if all ranks have run every granted step, and none has left early."""
        busy = self.grants or self._is_paused or self._handover.adopting
        return not (busy or self._left)

    def make_room(self, wanted: bool) -> list[Instruction]:
        """Grants no steps while ``wanted``, so that the ranks become idle."""
        was_wanted, self._makes_room = self._makes_room, wanted
        return [*self._top_up()] if was_wanted and not wanted else []

    def remove(self, rank: int) -> None:
        """Removes a lost rank; grants nothing until :meth:`regrouped`."""
        self._is_paused = True
        del self._members[rank]
        self._handover.remove(rank)
        self.grants.remove(rank)
        self._follow_members()

    def add(self, member: Member) -> None:
        """Adds a rank, which takes part from the next epoch or part of one."""
        self._is_paused = True
        self._members[member.rank] = member.horizon_batches
        self._follow_members()

    def arrived(self, rank: int, lost: Runs) -> None:
        """Notes a member of the new group before :meth:`regrouped`; see `Regrouped`."""
        self._handover.ready.discard(rank)  # it has run its steps in an earlier group
        self._lost.update(lost)

    def regrouped(self, reduced: Mapping[int, int], now_s: float) -> Outcome:
        """Resumes after all members have formed their group, without dead ranks.

        They run the steps that any of them has begun. Then the epoch pauses, and its
        rest is divided again.

        Args:
            reduced: by member, the last step of the epoch that it will have run.
            now_s: current time.
        """
        self._is_paused = False
        self._left = EarlyEnd(self._policy)
        self.grants.settle(max(reduced.values()) + 1, self._lost)
        self.is_cut = True
        self._handover.await_steps(self._members.keys())
        return self._advance(now_s)

    def _follow_members(self) -> None:
        self.grants.follow(self._members)
        self.shares.follow(self._members)
        self.exclusion.reset(sorted(self._members))

    def check(self) -> None:
        """Asserts that every step, and every pending report, is in one place."""
        self.grants.check(self._members.keys())
        self._handover.check(self._members.keys())
        if not self._left:
            returned = sum(stop - start for start, stop in self._returned)
            used = self.grants.sizes.position_of(self.grants.committed_until)
            assert self._totals.samples == used - returned

    def has_left(self, rank: int) -> bool:
        """True if a rank's loop has left the epoch early."""
        return rank in self._left

    def waiting_for(self) -> str:
        """Names the ranks that the epoch waits for, and their pending work."""
        if self._is_paused:
            return "the remaining ranks to form a new group"
        if adopting := self._handover.adopting:
            what = "finish the started steps" if self._lost else "adopt the model"
            return f"ranks {sorted(adopting)} to {what}"
        silent = sorted(self.grants.oldest.owing) if self.grants.oldest else []
        return f"steps of ranks {silent} in epoch {self._epoch}"

    def _take(self, event: StepsDone) -> None:
        if event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} reports steps it was not granted")
        self.grants.take(event)
        self._left.done(event)
        self._numbers.take(event)
        self._numbers.check(event.epoch, self._active, is_last=False)
        self.exclusion.unknown[event.rank] = event.unknown
        self.shares.limit(event.rank, event.max_samples)

    def _is_complete(self, grant: Granted) -> bool:
        if grant.is_settled:
            return not self._handover.adopting
        return not grant.owing and bool(grant.reports)

    def _complete(self, grant: Granted, now_s: float) -> list[Instruction]:
        """Counts and measures a grant that all ranks have run."""
        for work in grant.work():
            self._totals.add(grant.stop - 1, work)
        for step, start, stop in grant.missing_parts():
            first = self.grants.sizes.position_of(step)
            self._returned.append((first + start, first + stop))
        self.exclusion.changing = ()
        self._left.completed(grant.stop)
        reports = [grant.reports[rank] for rank in sorted(grant.reports)]
        replies: list[Instruction] = []
        if not grant.is_settled:
            self._checks.compare({report.rank: report.checks for report in reports})
            if not grant.left:
                replies += self._measure(grant, reports, now_s)
                if self.watch is not None:
                    replies += self.watch(reports, grant.steps)
        sync_s = max((report.sync_wait_s for report in reports), default=0.0)
        first, last, steps = min(self._members), grant.stop - 1, grant.steps
        return [*replies, self._totals.close_window(last, now_s, first, sync_s, steps)]

    def _measure(
        self, grant: Granted, reports: Sequence[StepsDone], now_s: float
    ) -> Sequence[Instruction]:
        """Records the active ranks' measured times of a grant.

        Raises:
            ConfigError: the ranks ran different backward passes.
        """
        passes = [report.backward_passes for report in reports]
        if len({(report.backward_passes, report.pass_steps) for report in reports}) > 1:
            what = "different numbers of" if len(set(passes)) > 1 else "other batches'"
            raise ConfigError(
                f"ranks ran {what} backward passes up to step {grant.stop - 1}: "
                f"{passes}; {self._left.under} {SAME_PASSES}"
            )
        if self._is_deterministic:
            return []
        steps = grant.steps
        if all(report.warm for report in reports):
            self.shares.measured(reports, steps)
            taken_s = max(report.busy_s + report.sync_wait_s for report in reports)
            self.grants.measured(taken_s / steps)
        left = self.grants.ungranted
        return self.exclusion.measured(reports, steps, left, now_s)

    def _top_up(self) -> list[GrantBatches]:
        """Grants more steps, or an empty grant to loops that would wait in vain."""
        holds = self._makes_room or self._is_paused
        if not (holds or self.is_cut or self._left):
            return self.grants.top_up(self._active)
        return [] if self._lost else self.grants.grant_nothing(self._active)

    def _leave(self, event: EpochLeft, now_s: float) -> Outcome:
        """Handles a loop's early exit: granted steps are run, no others granted."""
        if event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} cannot leave epoch {event.epoch}")
        if self._is_paused or self._handover.adopting:
            raise ProtocolError(
                f"rank {event.rank} left epoch {event.epoch} while the surviving "
                f"ranks formed a new group; {event.apart}"
            )
        self.grants.leave(event)
        replies = self._left.take(event, self._active)
        self._numbers.take(event)
        self._totals.add(max(0, event.step - 1), report_of(event))
        outcome = self._advance(now_s)
        outcome.instructions[:0] = replies
        return outcome

    def _end_early(self, outcome: Outcome, now_s: float) -> Outcome:
        """Ends the epoch when the staying ranks have run the granted steps."""
        active = self._active
        staying = self._left.staying(active)
        grants, handover = self.grants, self._handover
        if (staying and grants) or handover.adopting:
            return outcome
        if staying and grants.fetches_early:
            raise ProtocolError(
                f"ranks {sorted(active - {*staying})} left epoch {self._epoch} before "
                f"ranks {staying}, whose last backward pass is still to come, because "
                f"{EARLY}; leave it after the same step on every rank"
            )
        done = grants.until if staying else self._left.step
        final, behind = {*self.exclusion.final}, handover.behind
        source = self._left.settle(active - final, is_needed=bool(behind | final))
        if source is not None:
            outcome.instructions += handover.instruct(self._members, source, done - 1)
            return outcome
        steps, first = done - grants.committed_until, min(self._members)
        if steps > 0:
            part = self._totals.close_window(done - 1, now_s, first, 0.0, steps)
            outcome.instructions.append(part)
        self._end(outcome, now_s)
        return outcome
