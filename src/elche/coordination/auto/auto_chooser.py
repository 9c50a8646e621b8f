"""``auto``: measures the first steps, then runs the policy of best predicted goodput.

A run begins under ``sync``, which does not change the optimisation. Its first steps
measure the cost of a batch on every rank; the cost of a reduction was probed when the
group was formed. From these, goodput is predicted (`elche.cadence.goodput`) and a
policy chosen (`elche.cadence.chooser`). Either ``sync`` continues, or the epoch is cut
and its rest runs in windows of averaged parameters. The update rule is then fixed. If
``sync`` is slower than the fastest device, that device trains alone in windows, which
keep the update rule, and the other ranks copy its model. The choice is repeated at each
epoch's start, and under ``sync`` also inside an epoch. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import cast, final

from elche.cadence.chooser import PATIENCE, Choice, Chooser
from elche.cadence.goodput import predict
from elche.config import PolicyName, RunConfig
from elche.config_parts import OuterConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.first_choice import FirstChoice
from elche.coordination.auto.measures import MeasuredSteps, Measures
from elche.coordination.fatal_losses import LossLimits
from elche.coordination.policy import Member, Outcome
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import Instruction, PolicyChosen
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.coordination.windows.window_policy import WindowPolicy

OBSERVED_GRANTS = 16
"""Grants of steps between two choices."""
ALONE_ANCHOR = 20
"""Batches in a window of a device that trains alone."""
LONGEST_ALONE = 1 << 20
"""Upper bound on windows of one device; the last one runs to the epoch's end, so that
only one reduction is waited for there.
"""
ANOTHER_ANCHOR = 2
"""Error factor in the length of overlapped windows above which they are rebuilt."""
RETURN_COST = 0.01
"""Fraction of the time on one device that trying steps of all ranks may cost."""


class _Phase(Enum):
    """Phases of a run under ``auto``, with their transitions.

    ==========================================  ======================  =============
    event                                       from                    to
    ==========================================  ======================  =============
    the choice is ``sync``                      MEASURING               STEPS
    the choice is windows, or one rank alone    MEASURING, STEPS        LEAVING
    an epoch, or the rest of one, begins        LEAVING                 WINDOWS
    an epoch begins, ``sync`` is chosen, all
    optimizers are equal                        WINDOWS, of one rank    STEPS
    one rank is left                            any                     FIXED
    a rank joins before a choice was made       MEASURING, FIXED        MEASURING
    a rank joins after it                       FIXED                   STEPS, WINDOWS
    ==========================================  ======================  =============

    Where an epoch begins, other windows may be chosen.
    """

    MEASURING = "steps are measured for a first choice"
    STEPS = "steps, because they were chosen"
    LEAVING = "the steps that are granted already; then windows"
    WINDOWS = "windows of averaged parameters, or of one rank alone"
    FIXED = "one rank is left: nothing is chosen"


@final
class AutoChooser(MeasuredSteps):
    """Chooses by predicted goodput, and again as measurements change."""

    policy: SyncPolicy | WindowPolicy

    def __init__(self, members: Sequence[Member], settings: Settings) -> None:
        super().__init__(members, settings)
        self._config = settings.config
        self._phase = _Phase.MEASURING if len(members) > 1 else _Phase.FIXED
        self._first = FirstChoice(self._measures)
        # A rank without work would be the slowest rank, on which the others wait.
        may_lead = self._config.windows.max_batch_diff is None
        self._excludes = may_lead and self._config.leave_out
        self._chooser: Chooser  # the one that made the first choice
        self._choice: Choice | None = None
        self._samples = self._next_window = 0
        self._alone_since_s = 0.0
        self._trains_alone = False  # one rank, in windows
        self._is_unsaid = False  # a choice was made between epochs, unreported
        self._has_changed = False  # the membership, since an epoch or part began

    @property
    def _windows(self) -> WindowPolicy | None:
        return self.policy if isinstance(self.policy, WindowPolicy) else None

    @property
    def _chosen(self) -> Choice:
        assert self._choice is not None, self._phase
        return self._choice

    @property
    def _wants_windows(self) -> bool:
        is_kept = bool(self._sync.exclusion.final)  # windows need every rank's state
        return self._chosen.carried_out_by != "sync" and not is_kept

    @property
    def loss_limits(self) -> LossLimits:
        """Limits of the policy in force; adds a rank that trains alone as holder."""
        limits, windows = super().loss_limits, self._windows
        if windows is None or not self._trains_alone:
            return limits
        return replace(limits, sole_holders=self._members.keys() - windows.state.idle)

    def prepare(self, sync_s: float, now_s: float, *, alike: bool) -> None:
        """Chooses the policy for the next epoch, or for the rest of one."""
        self.state_from = None
        self._samples += self.policy.totals.samples
        if self._phase is _Phase.MEASURING:
            self._measures.probe_s = self._measures.probe_s or sync_s
            self._sync.grants.is_single = True
        elif self._phase is not _Phase.FIXED:
            windows = self._windows
            known_s = windows.state.pacing.measured_sync_s if windows else 0.0
            self._measures.sync_s = known_s or self._measures.sync_s or sync_s
            if self._phase is not _Phase.LEAVING or self._has_changed:
                self._is_unsaid |= self._choose()
            self._carry_out(now_s, alike=alike)
        self._has_changed = False

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Starts an epoch, or the rest of one, under the policy in force."""
        outcome = super().begin_epoch(epoch, sizes, now_s)
        if self._phase is _Phase.STEPS:
            outcome.instructions += self._exclude()
        if self._is_unsaid:
            outcome.instructions += self._announce()
        return outcome

    def remove(self, rank: int) -> None:
        """Removes a lost rank; chooses again at the next epoch."""
        del self._members[rank]
        self._has_changed = True
        self._sync.remove(rank)
        if windows := self._windows:
            windows.remove(rank)
        if len(self._members) < 2 or (
            windows and self._trains_alone and not windows.state.idle
        ):
            self._phase = _Phase.FIXED
            self._is_unsaid = False
            self._share_among_all()
        self._times.pop(rank, None)

    def add(self, member: Member) -> None:
        """Adds a rank, assumed of average speed, and chooses again."""
        self._members[member.rank] = member
        self._has_changed = True
        self._sync.add(member)
        if windows := self._windows:  # built without the rank: no work for it
            windows.add(member, is_idle=True)
        if self._choice is None:
            self._phase = _Phase.MEASURING
            self._measures = Measures(self._settings, self._times)
            self._first = FirstChoice(self._measures)
            self._share_among_all()
        elif self._phase is _Phase.FIXED:
            self._phase = _Phase.STEPS if self._windows is None else _Phase.WINDOWS
        self._measures.sync_s = 0.0  # probed again with the new rank
        self._alone_since_s = -math.inf

    def _share_among_all(self) -> None:
        """Grants steps ahead again, with shares for all ranks."""
        self._sync.grants.is_single = False
        self._sync.shares.assign_least(())

    def _watch(self, reports: Sequence[StepsDone], steps: int) -> list[Instruction]:
        """Records measured steps before ``sync`` grants more."""
        measures = self._measures
        if self._phase is _Phase.MEASURING:
            measures.take(reports, steps)
            return self._choose_first(reports)
        if self._phase is not _Phase.STEPS:
            return []
        if all(report.warm for report in reports):
            measures.take(reports, steps)
        if measures.count < OBSERVED_GRANTS:
            return []
        measures.settle()
        replies = self._announce() if self._choose(PATIENCE) else []
        return [*replies, *self._stay_or_leave()]

    def _choose_first(self, reports: Sequence[StepsDone]) -> list[Instruction]:
        """Makes the first choice if another measured step costs more than it gains."""
        cluster = self._cluster()
        minimal = self._first.minimal(cluster)
        if self._first.is_due(reports, cluster, minimal):
            chooser = Chooser(leaves_out=self._excludes)
            choice = chooser.choose(cluster)
            if self._first.accepts(choice):
                self._choice, self._chooser = choice, chooser
                is_local = self._wants_windows and not choice.is_alone
                chooser.fix_update("parameters" if is_local else "gradients")
                self._measures.settle()
                self._share_among_all()
                return [*self._announce(), *self._stay_or_leave()]
            minimal = ()  # steps under the likely choice cost nothing extra
        self._sync.shares.assign_least(minimal)
        return []

    def _choose(self, patience: int = 1) -> bool:
        """Evaluates the choice again; returns True if it changed."""
        before = self._chosen
        self._choice = self._chooser.choose(self._cluster(), patience)
        return not before.is_carried_out_as(self._chosen)

    def _stay_or_leave(self) -> list[Instruction]:
        """Continues steps if ``sync`` is the choice, else cuts the epoch.

        Ranks that ``sync`` excludes do not hold the model that windows begin with, so
        the exclusion ends first.
        """
        sync = self._sync
        if self._wants_windows and not sync.exclusion.is_on:
            self._phase = _Phase.LEAVING
            sync.is_cut = True
        elif self._phase is _Phase.MEASURING:
            self._phase = _Phase.STEPS
            return self._exclude()
        return []

    def _exclude(self) -> list[Instruction]:
        """Excludes the chosen ranks from steps, unless that is decided already."""
        with_s = predict("sync", self._cluster()).window_s
        excluded, without_s = self._chosen.excluded, self._chosen.prediction.window_s
        return [*self._sync.exclusion.allow(excluded, with_s, without_s)]

    def _carry_out(self, now_s: float, *, alike: bool) -> None:
        """Applies the choice to the policy at an epoch's start."""
        choice, windows = self._chosen, self._windows
        if self._wants_windows:
            if windows is None or self._is_outdated(windows):
                self._begin_windows(now_s)
        elif windows is None:
            self._phase = _Phase.STEPS
        # All ranks take the same steps, so their optimizers must be the same.
        elif alike and self._may_return(choice, now_s):
            (self.state_from,) = self._members.keys() - windows.state.idle
            self._next_window = windows.first_window
            self.policy, self._phase = self._sync, _Phase.STEPS
        else:
            self._is_unsaid = False

    def _is_outdated(self, windows: WindowPolicy) -> bool:
        """True if the current windows are not those of the new choice."""
        choice = self._chosen
        chosen = choice.carried_out_by, frozenset(choice.excluded)
        if (windows.name, windows.state.idle) != chosen:
            return True
        anchors = sorted((choice.anchor, windows.state.config.windows.anchor))
        overlapped = windows.name == "async" and not choice.is_alone
        return overlapped and anchors[1] >= ANOTHER_ANCHOR * anchors[0]

    def _may_return(self, choice: Choice, now_s: float) -> bool:
        """True if trying steps of all ranks costs little of the time on one device."""
        ahead = max(member.horizon_batches for member in self._members.values()) + 2
        cost_s = (OBSERVED_GRANTS + ahead) * choice.prediction.window_s
        return (now_s - self._alone_since_s) * RETURN_COST >= cost_s

    def _begin_windows(self, now_s: float) -> None:
        """Starts the chosen windows with the times measured so far.

        They cut batches for all ranks of the run, including excluded ones, so that
        local steps keep their size. One rank alone trains whole batches.
        """
        choice = self._chosen
        if windows := self._windows:
            self._next_window = windows.first_window
        self._sync.exclusion.stop()
        self.policy = WindowPolicy(
            windows_config(self._config, choice),
            [*self._members.values()],
            self._settings.epochs,
            idle=frozenset(choice.excluded),
            first_window=self._next_window,
            cut_for=None if choice.is_alone else self._settings.cut_for,
            times=self._times,
            progress_samples=self._samples,
        )
        self._trains_alone = choice.is_alone
        self._alone_since_s = now_s
        self._phase = _Phase.WINDOWS

    def _announce(self) -> list[Instruction]:
        """Reports the choice in one line; windows gain less in short runs."""
        self._is_unsaid = False
        choice = self._chosen
        reason = f"{choice.reason}; {self._length}"
        if self._wants_windows and not choice.is_alone:
            samples = self._cluster().batch_size
            reason += f"; steps of {samples} samples"
        first, name = min(self._members), choice.carried_out_by
        return [PolicyChosen(rank=first, policy=name, reason=reason)]


def windows_config(config: RunConfig, choice: Choice) -> RunConfig:
    """Returns the run's settings under the chosen policy."""
    name, most = choice.carried_out_by, max(1, config.windows.max_anchor)
    anchor = min(ALONE_ANCHOR if choice.is_alone else choice.anchor, most)
    windows = replace(config.windows, anchor=anchor)
    if name == "async":  # shorter windows would end before their reduction
        lowest = max(anchor, min(windows.min_anchor, most))
        windows = replace(windows, min_anchor=lowest)
    if choice.is_alone:  # its windows only keep the others up to date
        average = OuterConfig(optimizer="average")
        windows = replace(windows, outer=average, max_anchor=LONGEST_ALONE)
    policy = cast("PolicyName", name)
    return replace(config, policy=policy, windows=windows, speed_hints=None)
