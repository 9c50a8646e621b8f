"""``auto``: the policy that runs, steps or windows, and what becomes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, final

from elche.cadence.chooser import Choice
from elche.config import PolicyName, RunConfig
from elche.config_parts import OuterConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.policy import Member, Outcome, Policy
from elche.coordination.protocol.events import EpochLeft, Event
from elche.coordination.protocol.instructions import EndEpoch, SwitchPolicy
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.coordination.windows.window_policy import TakenOver, WindowPolicy

ALONE_ANCHOR = 20
"""Batches in a window of a device that trains alone."""
LONGEST_ALONE = 1 << 20
"""Its most: the last one goes on to the epoch's end, however long a reduction takes,
so that one device waits for one reduction there, not for two."""
ANOTHER_ANCHOR = 2
"""Overlapped windows that should be longer or shorter by this factor are rebuilt."""


def windows_config(
    config: RunConfig, choice: Choice, speed_hints: tuple[float, ...] | None
) -> RunConfig:
    """The run's settings, under the chosen policy.

    Args:
        config: of the run.
        choice: what windows are to do.
        speed_hints: batches per second of each rank, as far as they are known.
    """
    name, most = choice.carried_out_by, max(1, config.windows.max_anchor)
    anchor = min(ALONE_ANCHOR if choice.is_alone else choice.anchor, most)
    windows = replace(config.windows, anchor=anchor)
    if name == "async":  # shorter ones would end before their reduction
        lowest = max(anchor, min(windows.min_anchor, most))
        windows = replace(windows, min_anchor=lowest)
    if choice.is_alone:  # its windows only keep the others up to date
        average = OuterConfig(optimizer="average")
        windows = replace(windows, outer=average, max_anchor=LONGEST_ALONE)
    policy = cast("PolicyName", name)
    return replace(config, policy=policy, windows=windows, speed_hints=speed_hints)


@final
@dataclass(frozen=True, slots=True)
class RunningWindows:
    """Windows, and the choice that they carry out."""

    policy: WindowPolicy
    choice: Choice

    def is_outdated_by(self, choice: Choice) -> bool:
        """Whether they run otherwise than was chosen since."""
        if not choice.is_carried_out_as(self.choice):
            return True
        anchors = sorted((choice.anchor, self.choice.anchor))
        overlapped = choice.carried_out_by == "async"
        return overlapped and anchors[1] >= ANOTHER_ANCHOR * anchors[0]


@final
class PolicySwitch:
    """Runs steps, or windows in their place, and counts what the run has done.

    Args:
        members: all ranks, in order.
        settings: what the ranks agreed on.

    Attributes:
        sync: grants the steps; goes on after windows with what it knew before.
        windows: that run now; None while steps do.
    """

    def __init__(self, members: Sequence[Member], settings: Settings) -> None:
        self._settings = settings
        self._members = {member.rank: member for member in members}
        self.sync = SyncPolicy(members, settings)
        self.windows: RunningWindows | None = None
        self._next_window = 0
        self._epoch = -1
        self._sizes = BatchSizes(())
        self._samples_before = 0

    @property
    def current(self) -> Policy:
        """The policy that runs."""
        return self.sync if self.windows is None else self.windows.policy

    @property
    def ranks(self) -> list[int]:
        """Of the run, in order."""
        return list(self._members)

    @property
    def idle(self) -> frozenset[int]:
        """Ranks that windows give no work."""
        return frozenset() if self.windows is None else self.windows.policy.idle

    def remove(self, rank: int) -> None:
        """A rank is gone, also from steps that may follow windows."""
        del self._members[rank]
        self.sync.remove(rank)
        if self.windows is not None:
            self.windows.policy.remove(rank)
            self._follow_idle(self.windows)

    def add(self, member: Member) -> None:
        """A rank joins; windows that were built without it have no work for it."""
        self._members[member.rank] = member
        self.sync.add(member)
        if self.windows is not None:
            self.windows.policy.add(member, is_idle=True)
            self._follow_idle(self.windows)

    def _follow_idle(self, windows: RunningWindows) -> None:
        left_out = tuple(sorted(windows.policy.idle))
        choice = replace(windows.choice, left_out=left_out)
        self.windows = RunningWindows(windows.policy, choice)

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Begins an epoch under what runs."""
        self._epoch, self._sizes = epoch, sizes
        return self.current.begin_epoch(epoch, sizes, now_s)

    def end_epoch(self, outcome: Outcome, event: Event | None) -> None:
        """Counts samples of the epoch that are in the model at its end."""
        for each in outcome.instructions:
            if isinstance(each, EndEpoch):
                self._samples_before += each.samples
                return
        steps = event.step if isinstance(event, EpochLeft) else self._sizes.num_batches
        self._samples_before += self._sizes.samples_in(0, steps)

    def build_windows(
        self,
        choice: Choice,
        speed_hints: tuple[float, ...] | None,
    ) -> None:
        """Windows as chosen run from now on, or from :meth:`take_over` on.

        They cut batches for the ranks of the run, excluded ones as well: local steps
        stay as large as they were. One rank alone takes batches whole.

        Args:
            choice: what they are to do.
            speed_hints: batches per second of each rank, as far as they are known.
        """
        if self.windows is not None:
            self._next_window = self.windows.policy.first_window
        self.sync.keep_all()
        policy = WindowPolicy(
            windows_config(self._settings.config, choice, speed_hints),
            list(self._members.values()),
            self._settings.epochs,
            idle=frozenset(choice.left_out),
            first_window=self._next_window,
            cut_for=None if choice.is_alone else self._settings.cut_for,
        )
        policy.start_from(self._samples_before)
        self.windows = RunningWindows(policy, choice)

    @property
    def may_take_over(self) -> bool:
        """Whether all granted steps are done, and some of the epoch are left."""
        is_left = self.sync.granted_until < self._sizes.num_batches
        return is_left and self.sync.is_drained

    def take_over(self, outcome: Outcome, now_s: float) -> None:
        """The windows that were built take over what is left of the epoch."""
        assert self.windows is not None
        windows, step = self.windows.policy, self.sync.granted_until
        outcome.instructions += [
            SwitchPolicy(
                rank=rank,
                epoch=self._epoch,
                step=step,
                policy=windows.name,
                window=windows.first_window,
                cut=windows.cut.to_wire(),
            )
            for rank in self._members
        ]
        progress_samples = self._samples_before + self._sizes.samples_in(0, step)
        done = TakenOver(step, self.sync.totals, progress_samples)
        begun = windows.take_over(self._epoch, self._sizes, now_s, done)
        outcome.instructions += begun.instructions
        outcome.notes += begun.notes

    def end_windows(self) -> int:
        """Steps take their place; returns the one rank that trained in them."""
        assert self.windows is not None
        (alone,) = self._members.keys() - set(self.windows.choice.left_out)
        self._next_window = self.windows.policy.first_window
        self.windows = None
        self.sync.grant_again()
        return alone
