"""``auto``: starts under ``sync``, measures, and runs the policy of most goodput.

The first steps of a run are taken under ``sync``, which leaves the optimisation as it
is. They tell what a batch costs every rank; what a reduction costs was probed when the
group was formed. Then goodput is predicted (`elche.cadence.chooser`), and the run stays
with ``sync`` or goes on with windows of averaged parameters; after that the update rule
is fixed. Where a reduction is slow the first step may decide for one device alone, and
no other is granted before. It goes on measuring. Windows change between ``cadence`` and
``async``, and leave out ranks or take them back, when an epoch begins. ``sync`` is left
only where the fastest device would be faster alone: it then trains in windows of its
own, which is no other rule, and the others follow it.

A rank that is left out is timed again now and then
(`elche.coordination.auto.auto_trials`). So are ways back found. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum

from elche.cadence.chooser import Chooser
from elche.cadence.goodput import predict
from elche.coordination.accounts.batch_ranges import (
    WHOLE_BATCHES,
    BatchCut,
    BatchSizes,
)
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_calibration import Calibration
from elche.coordination.auto.auto_choice import MeasuredChoice, RunLength
from elche.coordination.auto.auto_gauge import Gauge
from elche.coordination.auto.auto_trials import TRIAL_GRANTS, Trials
from elche.coordination.auto.auto_windows import PolicySwitch
from elche.coordination.fatal_losses import LossLimits
from elche.coordination.policy import EpochTotals, Member, Outcome, Policy
from elche.coordination.protocol.events import (
    BatchesDone,
    Event,
    StepsDone,
    WindowReduced,
)
from elche.coordination.protocol.instructions import Instruction, PolicyChosen
from elche.coordination.protocol.messages import Runs

OBSERVED_GRANTS = 16
OBSERVED_WINDOWS = 8
"""Measurements between two evaluations of the choice."""


class _Phase(Enum):
    """What the ranks do, and what may come of it.

    ============================================  ======================  ===========
    event                                         from                    to
    ============================================  ======================  ===========
    the choice is, or is still, ``sync``          CALIBRATING, TRIAL      STEPS
    the choice is windows                         CALIBRATING             LEAVING
    the choice is one rank alone                  STEPS, TRIAL            LEAVING
    that, and some are left out of the steps:
    an epoch begins                               STEPS                   ALONE
    granted steps are done, or an epoch begins:
    parameters are averaged                       LEAVING                 WINDOWS
    one rank trains in place of ``sync``          LEAVING                 ALONE
    an epoch begins, other windows are chosen     WINDOWS                 WINDOWS
    an epoch begins, and not what a cut left of
    it, a trial is due or ``sync`` is chosen,
    all optimizers are alike                      ALONE                   TRIAL
    a rank is gone, and windows are not the
    choice any more                               LEAVING                 TRIAL
    one rank is left                              any                     FIXED
    a rank joins: nothing was chosen yet          CALIBRATING, FIXED      CALIBRATING
    in steps                                      any but CALIBRATING     TRIAL
    where one rank trains alone                   ALONE, FIXED            ALONE
    where windows are the update                  LEAVING, WINDOWS,       LEAVING,
                                                  FIXED                   WINDOWS
    ============================================  ======================  ===========

    In TRIAL, WINDOWS and ALONE another choice is carried out when the phase ends, TRIAL
    with its last grant. A run of one rank is FIXED from its start. When a rank is gone,
    the others choose anew, by what is known of them; when one joins, as if it were of
    usual speed: windows where they next begin, steps when a few of all are measured.
    """

    CALIBRATING = "steps are measured for a first choice"
    STEPS = "steps, because they were chosen"
    TRIAL = "a few steps of all ranks, to see what they cost now"
    LEAVING = "the steps that are granted already; then windows"
    WINDOWS = "windows of averaged parameters"
    ALONE = "one rank trains in windows of its own, the others follow it"
    FIXED = "what ran last, to the end of the run; nothing is chosen any more"


class AutoPolicy(Policy):
    """Chooses by predicted goodput, and again as measurements change.

    Args:
        members: all ranks, in order.
        settings: what the ranks agreed on.
    """

    def __init__(self, members: Sequence[Member], settings: Settings) -> None:
        self._config = settings.config
        self._phase = _Phase.CALIBRATING if len(members) > 1 else _Phase.FIXED
        self._switch = PolicySwitch(members, settings)
        least, kind = settings.min_share_samples, settings.optimizer_kind
        self._gauge = Gauge(self._config, len(members), least, kind)
        self._ahead_steps = max(member.horizon_batches for member in members) + 2
        self._calibration = Calibration(
            self._gauge, self._switch.sync, self._new_chooser
        )
        self._choice: MeasuredChoice | None = None
        self._trials = Trials()
        self._grants_left = 0  # of the trial, in TRIAL
        self._state_from: int | None = None  # in the epoch that begins
        self._length = RunLength(settings.epochs)
        self._batch_size = 0
        self._is_unsaid = False  # what was chosen when a rank was gone, or joined
        self._has_grown = False  # since an epoch, or a part of one, began
        self._now_s = 0.0

    def _new_chooser(self) -> Chooser:
        # A rank that trains nothing would be the slowest one that others wait for.
        may_lead = self._config.windows.max_batch_diff is None
        return Chooser(leaves_out=may_lead and self._config.leave_out)

    @property
    def _current(self) -> Policy:
        return self._switch.current

    @property
    def cut(self) -> BatchCut:  # type: ignore[override]
        """How the policy in force cuts batches."""
        return self._current.cut

    @property
    def first_window(self) -> int:
        """The first window's number, of the policy in force."""
        return self._current.first_window

    @property
    def totals(self) -> EpochTotals:
        """What the ranks did in the epoch under way, or the last one."""
        return self._current.totals

    @property
    def positions_left(self) -> Runs:
        """Positions of an epoch that was cut, or left, that nobody has trained on."""
        return self._current.positions_left

    @property
    def loss_limits(self) -> LossLimits:
        """Limits of the policy in force, and the rank that trains alone."""
        limits, windows = self._current.loss_limits, self._switch.windows
        if windows is None or not windows.choice.is_alone:
            return limits
        return replace(limits, sole_holders={*self._switch.ranks} - self._switch.idle)

    @property
    def is_cut(self) -> bool:
        """Whether the policy in force has ended the epoch with some of it left."""
        return self._current.is_cut

    @property
    def steps_left(self) -> int:
        """In how many global batches that is to be cut; 0: as the epoch was."""
        return self._current.steps_left

    def make_room(self, wanted: bool) -> list[Instruction]:
        """Ranks wait to be taken in; passed to the policy in force."""
        return self._current.make_room(wanted)

    @property
    def is_outdated(self) -> bool:
        """True if the epoch's batches were cut for other ranks."""
        return self._current.is_outdated

    @property
    def state_from(self) -> int | None:
        """Whose optimizer state all take before the epoch; None: each its own."""
        return self._state_from

    def check(self) -> None:
        """Asserts the invariants of the policy in force."""
        self._current.check()

    def has_left(self, rank: int) -> bool:
        """Whether a rank's loop has left the epoch early."""
        return self._current.has_left(rank)

    def owes(self, rank: int) -> bool:
        """Whether the epoch under way cannot end without a rank."""
        return self._current.owes(rank)

    def waiting_for(self) -> str:
        """Whom the policy in force waits for."""
        return self._current.waiting_for()

    def prepare_epoch(self, sync_s: float, *, alike: bool) -> None:
        """An epoch is about to begin: windows begin, change or end here."""
        self._state_from = None
        windows, phase = self._switch.windows, self._phase
        if self._has_grown and phase in (_Phase.WINDOWS, _Phase.LEAVING):
            self._gauge.sync_s = sync_s or self._gauge.sync_s  # probed with who joined
            self._is_unsaid |= self._chosen.observe(self._batch_size)
        self._has_grown = False
        is_outdated = windows is not None and windows.is_outdated_by(self._chosen.now)
        if phase is _Phase.CALIBRATING:
            self._calibration.prepare(sync_s)
        elif (
            phase is _Phase.LEAVING
            or (phase is _Phase.WINDOWS and is_outdated)
            or (phase is _Phase.STEPS and self._chosen.wants_windows)
        ):
            self._begin_windows()
        # In steps ranks must do the same, so their optimizers must be the same.
        elif phase is _Phase.ALONE and alike and self._may_return:
            self._return_to_steps()

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Starts an epoch under the policy in force."""
        if epoch + 1 != self._length.begun_epochs:  # not what was left of a cut one
            self._length = replace(
                self._length, begun_epochs=epoch + 1, epoch_batches=sizes.num_batches
            )
        self._batch_size = max(sizes.runs, key=lambda run: run[1])[0]
        self._gauge.begin_epoch(float(self._length.batches))
        outcome = self._switch.begin_epoch(epoch, sizes, now_s)
        if self._is_unsaid:
            self._announce(outcome, is_now=True)
        return outcome

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Takes an event of the epoch under way; chooses when enough is measured."""
        self._now_s = now_s
        notice = Outcome()
        if isinstance(event, StepsDone):
            self._measure_steps(event, notice)
        outcome = self._current.handle(event, now_s)
        outcome.instructions[:0] = notice.instructions
        outcome.notes[:0] = notice.notes
        if outcome.epoch_over:
            self._switch.end_epoch(outcome, event)
        elif self._phase in (_Phase.WINDOWS, _Phase.ALONE):
            self._measure_windows(event, outcome)
        else:
            self._leave_steps(outcome, now_s)
        return outcome

    def _leave_steps(self, outcome: Outcome, now_s: float) -> None:
        """Windows take over where they are due and all granted steps are done."""
        if self._phase is _Phase.LEAVING and self._switch.may_take_over:
            self._begin_windows()
            self._switch.take_over(outcome, now_s)

    def remove(self, rank: int) -> None:
        """A rank is gone: the others choose anew, by what is known of them."""
        self._gauge.remove(rank)
        self._switch.remove(rank)
        has_lost_all = self._phase is _Phase.ALONE and not self._switch.idle
        if len(self._switch.ranks) < 2 or has_lost_all:
            self._fix()
        elif self._phase not in (_Phase.CALIBRATING, _Phase.FIXED):
            self._is_unsaid |= self._chosen.observe(self._batch_size)
            if self._phase is _Phase.LEAVING and not self._chosen.wants_windows:
                self._switch.sync.grant_again()
                self._try_steps()

    def arrived(self, rank: int, lost: Runs) -> None:
        """A member is in the group that forms; passed to the policy in force."""
        self._current.arrived(rank, lost)

    def add(self, member: Member) -> None:
        """A rank joins: of usual speed until it is measured, and the choice is anew."""
        self._has_grown = True
        self._gauge.add(member.rank)
        self._switch.add(member)
        if self._choice is None:
            self._phase = _Phase.CALIBRATING
            self._calibration.begin_anew()
        elif not self._chosen.averages_gradients:
            is_before = self._switch.windows is None
            self._phase = _Phase.LEAVING if is_before else _Phase.WINDOWS
        elif self._switch.windows is None:
            self._switch.sync.grant_again()
            self._try_steps()
        else:
            self._phase = _Phase.ALONE
            self._trials.hurry()

    def _fix(self) -> None:
        """What runs now stays to the end; steps are shared among all again."""
        self._phase = _Phase.FIXED
        self._is_unsaid = False
        if self._switch.windows is None:
            self._calibration.break_off()

    def regrouped(self, reduced: Mapping[int, int], now_s: float) -> Outcome:
        """All members have formed their group; the policy in force goes on."""
        self._now_s = now_s
        outcome = self._current.regrouped(reduced, now_s)
        if self._is_unsaid:
            self._announce(outcome)
        if outcome.epoch_over:
            self._switch.end_epoch(outcome, None)
        else:
            self._leave_steps(outcome, now_s)
        return outcome

    @property
    def _chosen(self) -> MeasuredChoice:
        assert self._choice is not None, self._phase
        return self._choice

    @property
    def _may_return(self) -> bool:
        """Whether steps of all are the choice, or cost little of the time without."""
        if not self._chosen.now.is_alone:
            return True
        cluster = self._gauge.cluster(self._batch_size)
        return self._trials.are_steps_due(cluster, self._ahead_steps, self._now_s)

    def _measure_steps(self, event: StepsDone, notice: Outcome) -> None:
        """Measures steps before ``sync`` grants more of them."""
        if self._phase not in (_Phase.CALIBRATING, _Phase.STEPS, _Phase.TRIAL):
            return
        left_out = len(self._switch.sync.left_out)
        reports = self._gauge.reported(event, left_out)
        if not reports:
            return
        if self._phase is _Phase.CALIBRATING:
            self._choice = self._calibration.take(
                reports, self._batch_size, self._length.batches
            )
            if self._choice is not None:
                self._gauge = self._choice.gauge
                self._choice.begin()
                self._calibration.break_off()
                self._announce(notice)
                self._stay_or_leave(notice)
            return
        is_due = self._gauge.took_steps(reports)
        if self._phase is _Phase.TRIAL:
            self._grants_left -= is_due
        else:
            is_due = self._gauge.measurements >= OBSERVED_GRANTS
        if is_due:
            self._observe(notice)

    def _measure_windows(self, event: Event, outcome: Outcome) -> None:
        """Measures windows that all ranks have reduced, and trials in them."""
        gauge, windows = self._gauge, self._switch.windows
        assert windows is not None, self._phase
        if isinstance(event, BatchesDone):
            gauge.trained(event)
        elif isinstance(event, WindowReduced):
            samples = windows.policy.cut.largest_of(self._batch_size)
            if not gauge.reduced(event, samples):
                return
            if self._phase is _Phase.WINDOWS:
                outcome.instructions += self._trials.try_out(
                    windows, gauge, samples, self._now_s
                )
            if gauge.measurements >= OBSERVED_WINDOWS:
                self._observe(outcome)

    def _observe(self, notice: Outcome) -> None:
        """Evaluates the choice again; at once it only ends steps."""
        if self._chosen.observe(self._batch_size):
            self._announce(notice)
        is_trial_over = self._phase is _Phase.TRIAL and not self._grants_left
        if self._phase is _Phase.STEPS or is_trial_over:
            self._stay_or_leave(notice)

    def _stay_or_leave(self, notice: Outcome) -> None:
        """Steps go on if they are the choice, else no more are granted.

        Ranks that ``sync`` leaves out do not hold the model that windows begin with.
        """
        sync = self._switch.sync
        if self._chosen.wants_windows and not sync.leaves_out:
            self._phase = _Phase.LEAVING
            notice.instructions += sync.stop_granting()
        elif self._phase is not _Phase.STEPS:
            self._phase = _Phase.STEPS
            choice, cluster = self._chosen.now, self._gauge.cluster(self._batch_size)
            with_s = predict("sync", cluster).window_s
            without_s = choice.prediction.window_s
            notice.instructions += sync.leave_out(choice.left_out, with_s, without_s)

    def _announce(self, notice: Outcome, *, is_now: bool = False) -> None:
        """Reports the choice; windows pay less in short runs."""
        self._is_unsaid = False
        choice = self._chosen.now
        reason = f"{choice.reason}; {self._length}"
        if self._chosen.wants_windows and not choice.is_alone:
            samples = self._gauge.cut.largest_of(self._batch_size)
            reason += f"; steps of {samples} samples"
        if self._switch.windows is not None and not is_now:
            reason += "; from the next epoch on"
        notice.notes.append(reason)
        notice.instructions.append(
            PolicyChosen(
                rank=min(self._switch.ranks),
                policy=choice.carried_out_by,
                reason=reason,
            )
        )

    def _begin_windows(self) -> None:
        """Windows under the chosen policy, with the speeds that were measured."""
        chosen, before = self._chosen, self._switch.windows
        choice, ranks = chosen.now, self._switch.ranks
        hints = self._config.speed_hints
        if hints is not None and len(hints) != len(ranks):
            hints = None  # of another membership
        if not self._gauge.is_cold:
            cut = WHOLE_BATCHES if choice.is_alone else self._gauge.cut
            samples = cut.largest_of(self._batch_size)
            hints = self._gauge.speeds(ranks, choice.left_out, samples)
        self._switch.build_windows(choice, hints)
        if before is None or before.choice.left_out != choice.left_out:
            self._trials.begin(self._now_s)
        self.name = choice.carried_out_by
        self._phase = _Phase.ALONE if chosen.averages_gradients else _Phase.WINDOWS

    def _return_to_steps(self) -> None:
        """The epoch begins under ``sync``; a few grants tell whether it stays."""
        self._state_from = self._switch.end_windows()
        self.name = self._current.name
        self._try_steps()

    def _try_steps(self) -> None:
        """A few steps of all ranks tell what they cost now."""
        self._grants_left = TRIAL_GRANTS
        self._phase = _Phase.TRIAL
