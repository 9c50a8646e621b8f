"""``auto``: starts under ``sync``, measures, and runs the policy of most goodput.

The first steps of a run are taken under ``sync``, which leaves the optimisation as it
is. They tell what a batch costs every rank; what a reduction costs was probed when the
group was formed. Then goodput is predicted (`elche.cadence.chooser`), and the run stays
with ``sync`` or goes on with windows of averaged parameters; after that the update rule
is fixed. Where a reduction is slow the first step alone may decide that, and no other
is granted before. It goes on measuring. Windows change between ``cadence`` and
``async``, and leave out ranks or take them back, when an epoch begins. ``sync`` is left
only where the fastest device would be faster alone: it then trains in windows of its
own, which is no other rule, and the others follow it.

A rank that is left out is timed again now and then
(`elche.coordination.auto.auto_trials`). So are ways back found. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elche.cadence.chooser import Choice, Chooser
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_calibration import Calibration, Found
from elche.coordination.auto.auto_gauge import Gauge
from elche.coordination.auto.auto_trials import TRIAL_GRANTS, Trials
from elche.coordination.auto.auto_windows import is_outdated, windows_config
from elche.coordination.policy import Member, Outcome, Policy
from elche.coordination.protocol.events import (
    BatchesDone,
    EpochLeft,
    Event,
    StepsDone,
    WindowReduced,
)
from elche.coordination.protocol.instructions import (
    EndEpoch,
    Instruction,
    PolicyChosen,
    SwitchPolicy,
)
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.coordination.windows.window_policy import TakenOver, WindowPolicy

USUAL_EPOCHS = 10
"""Assumed number of epochs when ``epochs=`` is not given."""
OBSERVED_GRANTS = 16
OBSERVED_WINDOWS = 8
"""Measurements between two evaluations of the choice."""


class AutoPolicy(Policy):
    """Chooses by predicted goodput, and again as measurements change.

    Args:
        members: all ranks, in order.
        settings: what the ranks agreed on.
    """

    def __init__(self, members: Sequence[Member], settings: Settings) -> None:
        self._config = settings.config
        self._members = {member.rank: member for member in members}
        self._epochs = settings.epochs
        self._sync = SyncPolicy(members, settings)
        self._windows: WindowPolicy | None = None
        self._gauge = Gauge(self._config, len(members), settings.min_share_samples)
        self._chooser = self._new_chooser()
        self._choice: Choice | None = None
        self._running: Choice | None = None
        horizon = max(member.horizon_batches for member in members)
        self._ahead_steps = horizon + 2
        self._calibration = Calibration(
            self._gauge, self._sync, self._new_chooser, self._ahead_steps
        )
        self._is_gradients = self._is_glance = False
        self._is_final = len(members) == 1
        self._now_s = 0.0
        self._trials = Trials()
        self._trial = 0
        self._first_window = 0
        self._state_from: int | None = None
        self._reports: dict[int, dict[int, StepsDone]] = {}
        self._epoch = -1
        self._sizes = BatchSizes(())
        self._samples_before = 0
        self._is_broken_off = False

    @property
    def choice(self) -> Choice | None:
        """What was chosen and why; None while measuring."""
        return self._choice

    @property
    def _current(self) -> Policy:
        return self._sync if self._windows is None else self._windows

    @property
    def first_window(self) -> int:
        """See :meth:`Policy.first_window`."""
        return self._current.first_window

    @property
    def is_elastic(self) -> bool:
        """See :meth:`Policy.is_elastic`."""
        return self._current.is_elastic

    def make_room(self, wanted: bool) -> list[Instruction]:
        """See :meth:`Policy.make_room`."""
        return self._current.make_room(wanted)

    @property
    def is_quiet(self) -> bool:
        """See :meth:`Policy.is_quiet`."""
        return self._current.is_quiet

    @property
    def state_from(self) -> int | None:
        """See :meth:`Policy.state_from`."""
        return self._state_from

    def prepare_epoch(self, sync_s: float, *, alike: bool) -> None:
        """See :meth:`Policy.prepare_epoch`."""
        is_new = self._choice is None and not (self._is_final or self._gauge.grants)
        self._calibration.prepare(sync_s, is_new=is_new)
        self._state_from = None
        if self._windows is not None and self._is_gradients and not self._is_final:
            # In steps ranks must do the same, so their optimizers must be the same.
            if alike and (self._is_outdated or self._is_trial_due()):
                self._return_to_steps()
            return
        if not self._wants_windows:
            return
        if self._windows is None or (self._is_outdated and not self._is_final):
            self._windows = self._build_windows()
            self._windows.start_from(self._samples_before)

    def begin_epoch(
        self, epoch: int, sizes: BatchSizes, now_s: float, plan: str = ""
    ) -> Outcome:
        """See :meth:`Policy.begin_epoch`."""
        self._epoch, self._sizes = epoch, sizes
        self._gauge.run_batches = float(self.expected_batches)
        self._is_broken_off = False
        self._reports.clear()
        return self._current.begin_epoch(epoch, sizes, now_s)

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Takes an event of the epoch under way; chooses when enough is measured."""
        told = Outcome()
        self._now_s = now_s
        if self._windows is None:
            self._handle_steps(event, told)
        outcome = self._current.handle(event, now_s)
        outcome.instructions[:0] = told.instructions
        outcome.notes[:0] = told.notes
        if outcome.epoch_over:
            self._samples_before += self._committed(outcome, event)
        elif self._windows is not None:
            self._handle_windows(event, outcome)
        elif self._wants_windows and self._sync.is_drained and not self._is_broken_off:
            self._switch(outcome, now_s)
        return outcome

    def check(self) -> None:
        """See :meth:`Policy.check`."""
        self._current.check()

    def remove(self, rank: int) -> None:
        """A rank is gone: what was measured is of another membership."""
        self._stay()
        del self._members[rank]
        self._current.remove(rank)

    def add(self, member: Member) -> None:
        """A rank joins: what was measured is of another membership."""
        self._stay()
        self._members[member.rank] = member
        self._current.add(member)

    def _stay(self) -> None:
        """What runs now stays to the end; steps are shared among all again."""
        self._is_final = True
        if self._windows is None:
            self._choice, self._trial = None, 0
            self._calibration.break_off()

    def regrouped(self, reduced: Mapping[int, int], now_s: float) -> Outcome:
        """See :meth:`Policy.regrouped`."""
        outcome = self._current.regrouped(reduced, now_s)
        if outcome.epoch_over:
            self._samples_before += self._committed(outcome, None)
        return outcome

    def has_left(self, rank: int) -> bool:
        """See :meth:`Policy.has_left`."""
        return self._current.has_left(rank)

    def owes(self, rank: int) -> bool:
        """See :meth:`Policy.owes`."""
        return self._current.owes(rank)

    def waiting_for(self) -> str:
        """See :meth:`Policy.waiting_for`."""
        return self._current.waiting_for()

    @property
    def _batch_size(self) -> int:
        return self._sizes.runs[0][0]

    @property
    def expected_batches(self) -> int:
        """Batches of the whole run, if epochs stay as long as the one under way."""
        return self._expected_epochs * self._sizes.num_batches

    @property
    def _expected_epochs(self) -> int:
        """What was said, if it still holds; or as many again as it has begun."""
        begun = self._epoch + 1
        if self._epochs is not None and self._epochs >= begun:
            return self._epochs
        return max(USUAL_EPOCHS, 2 * begun)

    @property
    def _wants_windows(self) -> bool:
        choice = self._choice
        if choice is None or self._trial:
            return False
        return choice.policy != "sync" or choice.is_alone

    @property
    def _is_outdated(self) -> bool:
        """Whether windows run otherwise than was chosen since."""
        assert self._choice is not None
        assert self._running is not None
        return is_outdated(self._running, self._choice)

    def _committed(self, outcome: Outcome, event: Event | None) -> int:
        """Samples of the epoch that are in the model at its end."""
        for told in outcome.instructions:
            if isinstance(told, EndEpoch):
                return sum(told.samples)
        steps = event.step if isinstance(event, EpochLeft) else self._sizes.num_batches
        return self._sizes.samples_in(0, steps)

    def _handle_steps(self, event: Event, told: Outcome) -> None:
        """Measures steps before ``sync`` grants more of them."""
        if isinstance(event, EpochLeft):
            self._is_broken_off = True
        if not isinstance(event, StepsDone) or self._is_final or self._wants_windows:
            return
        reports = self._reports.setdefault(event.start, {})
        reports[event.rank] = event
        if len(reports) < len(self._members):
            return
        del self._reports[event.start]
        before = self._gauge.grants
        ordered = [reports[rank] for rank in sorted(reports)]
        self._gauge.took_steps(ordered)
        if self._choice is None:
            found = None
            if self._gauge.grants > before:
                found = self._calibration.measured(self._members, self._batch_size)
            elif not before:
                found = self._calibration.quick_check(ordered, self._batch_size)
            if found is not None:
                self._choose(found, told)
        elif self._trial:
            if self._gauge.grants > before:
                self._try_steps(told)
        elif self._gauge.grants >= OBSERVED_GRANTS:
            self._gauge.grants = 0
            self._observe(told)

    def _handle_windows(self, event: Event, told: Outcome) -> None:
        if self._is_final:
            return
        if isinstance(event, BatchesDone):
            self._gauge.trained(event)
        elif isinstance(event, WindowReduced):
            before = self._gauge.windows
            self._gauge.reduced(event, self._batch_size)
            if self._gauge.windows == before:
                return
            self._try_out(told)
            if self._gauge.windows >= OBSERVED_WINDOWS:
                self._gauge.windows = 0
                self._observe(told)

    def _try_out(self, told: Outcome) -> None:
        """Times a rank that is left out again, one after the other."""
        running, windows = self._running, self._windows
        assert running is not None
        assert windows is not None
        if not self._is_gradients:
            told.instructions += self._trials.try_out(
                windows, running, self._gauge, self._batch_size, self._now_s
            )

    def _is_trial_due(self) -> bool:
        """Whether steps of all ranks would cost little of the time without them."""
        cluster = self._gauge.cluster(self._batch_size)
        return self._trials.are_steps_due(cluster, self._ahead_steps, self._now_s)

    def _return_to_steps(self) -> None:
        """The epoch begins under ``sync``; a few grants tell whether it stays."""
        assert self._windows is not None
        assert self._running is not None
        (alone,) = self._members.keys() - set(self._running.left_out)
        self._state_from = alone
        self._first_window = self._windows.first_window
        self._windows = self._running = None
        self._trial = TRIAL_GRANTS
        self._gauge.grants = 0
        self._reports.clear()
        self._sync.grant_again()
        self.name = "sync"

    def _try_steps(self, told: Outcome) -> None:
        """A grant of a trial was measured."""
        self._trial -= 1
        self._gauge.grants = 0
        self._observe(told)
        if self._wants_windows:
            self._sync.stop_granting()

    def _new_chooser(self) -> Chooser:
        # A rank that trains nothing would be the slowest one that others wait for.
        return Chooser(leaves_out=self._config.windows.max_batch_diff is None)

    def _choose(self, found: Found, told: Outcome) -> None:
        """The first choice fixes the update rule."""
        self._is_glance = found.gauge is not self._gauge
        self._gauge, self._chooser = found.gauge, found.chooser
        self._choice = found.choice
        self._gauge.finish_learning()
        self._gauge.grants = 0
        self._sync.spare(())
        self._is_gradients = not self._wants_windows
        self._chooser.fix_update("gradients" if self._is_gradients else "parameters")
        self._say(told)

    def _observe(self, told: Outcome) -> None:
        """Looks at the choice again with what was measured since."""
        self._gauge.follow()
        before = self._choice
        choice = self._chooser.observe(self._gauge.cluster(self._batch_size))
        self._choice = choice
        assert before is not None
        if not before.is_carried_out_as(choice):
            self._say(told)

    def _say(self, told: Outcome) -> None:
        choice = self._choice
        assert choice is not None
        reason = f"{choice.reason}; {self._length_in_words}"
        if self._windows is not None:
            reason += "; from the next epoch on"
        elif self._wants_windows:
            self._sync.stop_granting()
        told.notes.append(reason)
        told.instructions.append(
            PolicyChosen(
                rank=min(self._members), policy=choice.carried_out_by, reason=reason
            )
        )

    @property
    def _length_in_words(self) -> str:
        """What a choice rests on: windows pay less in short runs."""
        said = f"in a run of {self.expected_batches} batches"
        if self._epochs is None:
            said += (
                f", assuming {self._expected_epochs} epochs (set epochs= to change it)"
            )
        return said

    def _build_windows(self) -> WindowPolicy:
        """Windows under the chosen policy, with the speeds that were measured."""
        choice = self._choice
        assert choice is not None
        hints = self._config.speed_hints
        if not self._is_glance:
            hints = self._gauge.speeds(self._members, choice.left_out, self._batch_size)
        self._is_glance = False
        config = windows_config(self._config, choice, hints)
        if self._running is None or self._running.left_out != choice.left_out:
            self._trials.begin(self._now_s)
        self.name, self._running = config.policy, choice
        return WindowPolicy(
            config,
            list(self._members.values()),
            self._epochs,
            idle=frozenset(choice.left_out),
            first_window=self._first_window
            if self._windows is None
            else self._windows.first_window,
        )

    def _switch(self, outcome: Outcome, now_s: float) -> None:
        """All granted steps are done: windows take over what is left of the epoch."""
        step = self._sync.granted_until
        if step >= self._sizes.num_batches:
            return  # the next epoch begins with windows
        self._windows = windows = self._build_windows()
        told: list[Instruction] = [
            SwitchPolicy(
                rank=rank,
                epoch=self._epoch,
                step=step,
                policy=self.name,
                window=windows.first_window,
            )
            for rank in self._members
        ]
        done = self._sizes.samples_in(0, step)
        follow = windows.take_over(
            self._epoch,
            self._sizes,
            now_s,
            TakenOver(step, self._sync.totals, self._samples_before + done),
        )
        outcome.instructions += told + follow.instructions
        outcome.notes += follow.notes
