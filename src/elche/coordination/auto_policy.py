"""``auto``: begins under ``sync``, measures, and goes on with what pays most.

The first steps of a run are taken under ``sync``, which leaves the optimisation as it
is. They tell what a sample costs every rank; what a reduction costs was probed when the
group was formed. Then goodput is predicted (`elche.cadence.chooser`), and the run stays
with ``sync`` or goes on with windows of averaged parameters; after that the update rule
is fixed, and shares and anchor move. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elche.cadence.chooser import Choice, Chooser
from elche.cadence.goodput import Cluster
from elche.config import RunConfig
from elche.coordination.agreement import Settings
from elche.coordination.ledger import BatchSizes
from elche.coordination.messages import (
    Event,
    Instruction,
    PolicyChosen,
    SwitchPolicy,
)
from elche.coordination.policy import Member, Outcome, Policy
from elche.coordination.sync_policy import SyncPolicy
from elche.coordination.window_policy import TakenOver, WindowPolicy

CALIBRATION_STEPS = 8
"""Measured steps before the choice."""


class AutoPolicy(Policy):
    """Chooses once, by predicted goodput.

    Args:
        config: the run's settings.
        members: all ranks, in order.
        settings: what else the ranks agreed on.
    """

    def __init__(
        self, config: RunConfig, members: Sequence[Member], settings: Settings
    ) -> None:
        self._config = config
        self._members = list(members)
        self._epochs = settings.epochs
        self._sync = SyncPolicy(config, members, settings.min_share_samples)
        self._windows: WindowPolicy | None = None
        self._chooser = Chooser()
        self._choice: Choice | None = None
        self._sync_s = 0.0
        self._epoch = -1
        self._sizes = BatchSizes(())
        self._samples_before = 0

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

    def prepare_epoch(self, sync_s: float) -> None:
        """See :meth:`Policy.prepare_epoch`."""
        self._sync_s = sync_s
        if self._is_switching and self._windows is None:
            self._windows = self._build_windows()
            self._windows.start_from(self._samples_before)

    def begin_epoch(
        self, epoch: int, sizes: BatchSizes, now_s: float, plan: str = ""
    ) -> Outcome:
        """See :meth:`Policy.begin_epoch`."""
        self._epoch, self._sizes = epoch, sizes
        return self._current.begin_epoch(epoch, sizes, now_s)

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Takes an event of the epoch under way; chooses when enough is measured."""
        outcome = self._current.handle(event, now_s)
        if outcome.epoch_over:
            self._samples_before += self._sizes.num_samples
            return outcome
        if self._windows is None:
            if self._choice is None:
                self._choose(outcome)
            if self._is_switching and self._sync.is_drained:
                self._switch(outcome, now_s)
        return outcome

    def check(self) -> None:
        """See :meth:`Policy.check`."""
        self._current.check()

    def patience_s(self) -> float:
        """See :meth:`Policy.patience_s`."""
        return self._current.patience_s()

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
    def _is_switching(self) -> bool:
        return self._choice is not None and self._choice.policy != "sync"

    def _choose(self, outcome: Outcome) -> None:
        if self._sync.measured_steps < CALIBRATION_STEPS:
            return
        sample_s, fixed_s = self._sync.costs_s()
        self._choice = self._chooser.observe(
            Cluster(
                seconds_per_sample=sample_s,
                fixed_s=fixed_s,
                batch_size=self._sizes.runs[0][0],
                sync_s=self._sync_s,
                overhead_target=self._config.overhead_target,
                max_anchor=max(1, self._config.max_anchor),
            )
        )
        sums_gradients = self._choice.policy == "sync"
        self._chooser.fix_update("gradients" if sums_gradients else "parameters")
        if self._is_switching:
            self._sync.stop_granting()
        elif self._choice.left_out:
            self._sync.leave_out(self._choice.left_out)
        reason = self._choice.reason
        outcome.notes.append(reason)
        outcome.instructions.append(
            PolicyChosen(
                rank=self._members[0].rank, policy=self._choice.policy, reason=reason
            )
        )

    def _build_windows(self) -> WindowPolicy:
        """Windows under the chosen policy, with the speeds that were measured."""
        choice = self._choice
        assert choice is not None
        sample_s, fixed_s = self._sync.costs_s()
        batch = self._sizes.runs[0][0]
        costs = [f + batch * s for s, f in zip(sample_s, fixed_s, strict=True)]
        config = replace(
            self._config,
            policy=choice.policy,
            anchor=max(1, min(choice.anchor, self._config.max_anchor)),
            speed_hints=tuple(min(costs) / cost for cost in costs),
        )
        self.name = choice.policy
        return WindowPolicy(
            config, self._members, self._epochs, idle=frozenset(choice.left_out)
        )

    def _switch(self, outcome: Outcome, now_s: float) -> None:
        """All granted steps are done: windows take over what is left of the epoch."""
        step = self._sync.granted_until
        if step >= self._sizes.num_batches:
            return  # the next epoch begins with windows
        self._windows = self._build_windows()
        told: list[Instruction] = [
            SwitchPolicy(
                rank=member.rank,
                epoch=self._epoch,
                step=step,
                policy=self.name,
                window=self._windows.first_window,
            )
            for member in self._members
        ]
        done = self._sizes.samples_in(0, step)
        follow = self._windows.take_over(
            self._epoch,
            self._sizes,
            now_s,
            TakenOver(step, self._sync.totals, self._samples_before + done),
        )
        outcome.instructions += told + follow.instructions
        outcome.notes += follow.notes
