"""Ranks that ``sync`` leaves out, because steps are shorter without them. Pure.

A rank whose least share takes longer than the others' whole step, or whose link does,
makes every step longer. What steps take with it is measured, what they would take
without it is predicted from the ranks' time models, and measured when it has gone. A
rank left out takes part in each epoch's first step, and takes over the others' model at
its end; it is tried again for some steps, for at most a fiftieth of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import final

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.policy import Member
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import LeaveOut
from elche.coordination.sync.step_gauge import (
    SETTLING_GRANTS,
    TRIED_STEPS,
    StepGauge,
)
from elche.coordination.sync.step_shares import StepShares

LEAST_GAIN = 0.1
"""By which part steps must become shorter for a rank to be left out."""
TRIAL_COST = 0.02
"""Budget of trials: fraction of the time since the last one."""
CARRYING_S = 0.1
"""Assumed time (s) of copying the model to excluded ranks, until measured."""
EVERY_COUNT = 8
"""Up to so many ranks are considered one by one, more in powers of two."""


class _Phase(Enum):
    """Phases of an exclusion, with their transitions.

    ==========================================  ======================  =============
    event                                       from                    to
    ==========================================  ======================  =============
    enough is measured: all bring something     MEASURING               TOGETHER
    enough is measured: some do not             all that measure        LEAVING
    an epoch begins, some bring nothing         TOGETHER, APART         TRIAL
    an epoch begins                             LEAVING, APART          TRIAL
    its first step is done                      TRIAL                   LEAVING
    or some steps, and all bring something      TRIAL                   MEASURING
    granted steps are done                      LEAVING                 APART
    the membership has changed                  any but OFF             MEASURING
    ==========================================  ======================  =============

    A loop that gets no batch in an epoch may fail (a mean over none, say), so each
    rank has a part in an epoch's first step.
    """

    OFF = "all keep a share to the end of the run"
    MEASURING = "all take part and are measured"
    TOGETHER = "all take part, because that was chosen"
    LEAVING = "the steps that are granted already; then some are left out"
    APART = "some are left out"
    TRIAL = "all take part in an epoch's first step, or in some to see what they cost"


@dataclass(frozen=True, slots=True)
class _Exclusion:
    """Ranks to leave out; seconds of a step as it is, and without them."""

    ranks: tuple[int, ...]
    with_s: float
    without_s: float
    is_predicted: bool = True

    @property
    def gain(self) -> float:
        """Steps in the time of one with all ranks."""
        return self.with_s / self.without_s

    def __str__(self) -> str:
        them = "it" if len(self.ranks) == 1 else "them"
        return (
            f"{_named(self.ranks)} left out: steps of {1e3 * self.with_s:.3g} ms take "
            f"{1e3 * self.without_s:.3g} ms without {them} ({self.gain:.2f} times as "
            f"fast); the model is brought to {them} at every epoch's end, and all are "
            "tried again now and then (leave_out=False keeps all)"
        )


@final
class LeftOutRanks:
    """Ranks that are excluded from steps, and the times of changes.

    Args:
        members: all ranks, in order.
        settings: what the ranks agreed on.
        shares: predicts steps, and gives ranks left out nothing.

    Attributes:
        ranks: who is left out now, in order.
        changing: ranks that are being left out, or take part again, until all who take
            part are in one group.
    """

    def __init__(
        self, members: Sequence[Member], settings: Settings, shares: StepShares
    ) -> None:
        config, debug = settings.config, settings.config.debug
        self._members = [member.rank for member in members]
        self._ahead_steps = max(member.horizon_batches for member in members) + 2
        self._shares = shares
        # Columns of fixed shares stay on their rank.
        is_fixed = debug.deterministic or config.shares == "fixed"
        is_on = config.leave_out and len(members) > 1
        self._is_allowed = is_on and not is_fixed
        self._phase = _Phase.OFF
        if self._is_allowed and config.policy == "sync":
            self._phase = _Phase.MEASURING
        self._unknown: dict[int, str] = {}
        self.ranks: tuple[int, ...] = ()
        self.changing: tuple[int, ...] = ()
        self._chosen: _Exclusion | None = None
        self._epoch, self._samples, self._steps_left = -1, 0, 0
        self._gauge = StepGauge(self._ahead_steps)
        self._bias: dict[tuple[int, ...], float] = {}
        self._carrying_s = CARRYING_S
        self._all_s = self._tried_at_s = self._trial_cost_s = 0.0
        self._announced: tuple[int, ...] = ()
        self._has_said_why = self._is_suspected = self._decides = False

    def allow(
        self, ranks: tuple[int, ...], with_s: float, without_s: float
    ) -> list[LeaveOut]:
        """``auto`` chose steps, by what it has measured without these ranks.

        Args:
            ranks: none, if all bring something.
            with_s: seconds of a step with them.
            without_s: and without them.
        """
        if not self._is_allowed or self._phase is not _Phase.OFF:
            return []
        self._enter(_Phase.MEASURING)
        return self._choose(_Exclusion(ranks, with_s, without_s)) if ranks else []

    def stop(self) -> None:
        """``auto`` left the steps: all ranks take part in the next ones."""
        self.reset(self._members)
        self._shares.leave_out(())
        self._phase = _Phase.OFF

    @property
    def is_leaving(self) -> bool:
        """No steps are granted until :meth:`leave`."""
        return self._phase is _Phase.LEAVING

    @property
    def is_trying(self) -> bool:
        """Steps are granted one by one."""
        return self._phase is _Phase.TRIAL

    def completed(self) -> None:
        """All who take part have run steps: they are in one group."""
        self.changing = ()

    def begin_epoch(
        self, epoch: int, sizes: BatchSizes, now_s: float
    ) -> list[LeaveOut]:
        """An epoch begins: ranks leave it after its first step, or are tried in it."""
        self._epoch, self._samples = epoch, sizes.runs[0][0]
        self._steps_left = sizes.num_batches
        told: list[LeaveOut] = []
        is_due = self._phase is _Phase.APART and self._is_trial_due(now_s)
        may_leave = self._phase in (_Phase.TOGETHER, _Phase.APART) and not is_due
        if may_leave and (found := self._shorter()):
            told = self._choose(found)
        if self._phase in (_Phase.LEAVING, _Phase.APART):
            self._enter(_Phase.TRIAL)
            self._decides = is_due
            if is_due:
                self._trial_cost_s = 0.0
            return self._set(())
        return told

    def leave(self, now_s: float) -> list[LeaveOut]:
        """No granted step is under way: from the next one on some are left out."""
        chosen = self._chosen
        assert chosen is not None, self._phase
        self._enter(_Phase.APART)
        is_new = chosen.ranks != self._announced
        if is_new or self._decides:
            self._tried_at_s = now_s
        self._announced = chosen.ranks
        line = str(chosen) if is_new else ""
        return self._set(chosen.ranks, line)

    def measured(
        self, reports: Sequence[StepsDone], steps: int, steps_left: int
    ) -> list[LeaveOut]:
        """Takes in what so many steps took those who take part.

        Args:
            reports: one of each, all of them warm.
            steps: how many.
            steps_left: of the epoch that are not granted.
        """
        if self._phase in (_Phase.OFF, _Phase.LEAVING):
            return []
        self._steps_left = steps_left
        step_s = self._gauge.take(reports, steps)
        if self._decides and self._chosen is not None and not self.ranks:
            self._trial_cost_s += steps * max(0.0, step_s - self._chosen.without_s)
        if self.is_trying and not self._decides:
            if any(self._unknown.values()):  # new in this epoch: nobody is behind yet
                self._chosen = None
                self._enter(_Phase.MEASURING)
                return []
            self._phase = _Phase.LEAVING
        if self.is_leaving or not self._gauge.is_full:
            return []
        if self._phase is _Phase.TRIAL:
            return self._end_trial()
        if self._phase is _Phase.MEASURING:
            return self._end_measuring()
        if self._phase is _Phase.APART and self._verify():
            found = self._shorter()  # some of the others may bring nothing either
            return [] if found is None else self._choose(found)
        return []

    def see(self, report: StepsDone) -> None:
        """Takes in whether a rank has state that cannot be carried to another."""
        if report.unknown:
            self._unknown[report.rank] = report.unknown
        else:
            self._unknown.pop(report.rank, None)

    def carried(self, cost_s: float) -> None:
        """A rank has taken over the model, or given it, which took so long."""
        self._carrying_s = cost_s

    def reset(self, members: Sequence[int]) -> tuple[int, ...]:
        """The members are others now and all take part; returns who was left out."""
        were, self.ranks, self.changing = self.ranks, (), ()
        self._members = list(members)
        self._chosen, self._is_suspected = None, False
        if self._phase is not _Phase.OFF:
            self._enter(_Phase.MEASURING)
        return were

    def _enter(self, phase: _Phase) -> None:
        """Another phase begins, in which steps are measured anew."""
        self._phase = phase
        ahead_steps = self._ahead_steps if phase is _Phase.MEASURING else 0
        self._gauge.begin(ahead_steps, is_trial=phase is _Phase.TRIAL)

    def _end_measuring(self) -> list[LeaveOut]:
        """All take part, and that is what it costs."""
        if found := self._shorter():
            if self._chosen is None and not self._is_suspected:
                self._is_suspected = True  # it is for the rest of the epoch
                self._gauge.again()
                return []
            return self._choose(found)
        self._phase = _Phase.TOGETHER
        before, self._chosen = self._chosen, None
        self._trial_cost_s = 0.0
        gain = 0.0 if before is None else before.without_s / self._gauge.step_s
        self._announced = ()
        if before is None or gain <= 1.0:
            return []
        takes = "takes" if len(before.ranks) == 1 else "take"
        return self._say(
            f"{_named(before.ranks)} {takes} part again: {gain:.2f} times as fast"
        )

    def _end_trial(self) -> list[LeaveOut]:
        """All have run some steps: are they shorter than those of the others?"""
        before, found = self._chosen, self._shorter()
        assert before is not None
        if found is None and self._gauge.step_s >= before.without_s:
            found = replace(before, with_s=self._gauge.step_s, is_predicted=False)
        if found is not None and self._is_worth(found):
            return self._choose(found)
        self._enter(_Phase.MEASURING)
        return []

    def _choose(self, found: _Exclusion) -> list[LeaveOut]:
        """Ranks are to be left out; all are kept where that would lose something."""
        unknown = next(filter(None, self._unknown.values()), "")
        if not unknown and self._first not in found.ranks:
            self._phase, self._chosen = _Phase.LEAVING, found
            if not self.ranks:  # else it is of steps without those
                self._all_s = found.with_s
            return []
        if self.ranks:
            return []
        self._phase, self._chosen = _Phase.TOGETHER, None
        if self._has_said_why:
            return []
        self._has_said_why = True
        why = unknown or "it is never left out; start it on a faster device"
        return self._say(
            f"steps are predicted to be {found.gain:.2f} times as fast without "
            f"{_named(found.ranks)}, but all keep a share: {why}"
        )

    def _verify(self) -> bool:
        """Takes in what steps take without the ranks left out; whether it is news."""
        chosen = self._chosen
        assert chosen is not None
        without_s, was_predicted = self._gauge.step_s, chosen.is_predicted
        if was_predicted:
            ratio = without_s / self._shares.step_s(self._samples, chosen.ranks)
            self._bias[chosen.ranks] = max(1.0, ratio)
        self._chosen = replace(chosen, without_s=without_s, is_predicted=False)
        return was_predicted

    def _shorter(self) -> _Exclusion | None:
        """Ranks without which steps are predicted to be clearly shorter, if any are."""
        if not self._gauge.is_full or len(self._members) - len(self.ranks) < 2:
            return None
        every = [self._without(ranks) for ranks in self._candidates()]
        hopeful = [min(every, key=attrgetter("without_s"))]
        if not self.ranks:  # the first rank is never left out, but that it is slow told
            hopeful.append(self._without((self._first,)))
        for found in hopeful:
            if found.gain > 1.0 + LEAST_GAIN and self._is_worth(found):
                return found
        return None

    def _is_worth(self, found: _Exclusion) -> bool:
        """True if it saves more in the epoch than taking over the model costs."""
        saved_s = (self._steps_left - 1) * (found.with_s - found.without_s)
        return saved_s > 2 * self._carrying_s

    @property
    def _first(self) -> int:
        """The rank that prints and saves: it is never left out."""
        return min(self._members)

    def _without(self, ranks: tuple[int, ...]) -> _Exclusion:
        """Step times with and without these ranks."""
        without_s = self._shares.step_s(self._samples, ranks)
        # What they took when these were left out before, or as it turned out for those
        # who are now: the last of several ranks is later than its mean. One that is
        # left alone waits for nobody.
        is_alone = len(self._members) - len(ranks) == 1
        bias = self._bias.get(ranks)
        if bias is None and not is_alone:
            bias = self._bias.get(self.ranks)
        if bias is not None:
            without_s *= bias
        elif not is_alone:
            without_s += self._gauge.shown_s
        return _Exclusion(ranks, self._gauge.step_s, without_s)

    def _candidates(self) -> Iterator[tuple[int, ...]]:
        """The slowest at a least share, the two slowest, ...; not the first rank."""
        least_s = self._shares.least_s(self._samples)
        others = (r for r in self._members if r not in (self._first, *self.ranks))
        slowest = sorted(others, key=lambda r: (-least_s[r], -r))
        count = 0
        while count < len(slowest):
            more = 1 if count < EVERY_COUNT else count
            count = min(count + more, len(slowest))
            yield tuple(sorted((*self.ranks, *slowest[:count])))

    def _is_trial_due(self, now_s: float) -> bool:
        """True if some steps of all cost little of the time since the last trial."""
        chosen = self._chosen
        assert chosen is not None
        steps = SETTLING_GRANTS + TRIED_STEPS
        expected_s = steps * (self._all_s - chosen.without_s)
        cost_s = max(self._trial_cost_s, expected_s)
        is_cheap = (now_s - self._tried_at_s) * TRIAL_COST >= cost_s
        may_return = not any(self._unknown.values())
        return may_return and (is_cheap or not self._is_worth(chosen))

    def _set(self, ranks: tuple[int, ...], reason: str = "") -> list[LeaveOut]:
        """All but these take part from now on; all are told."""
        self.changing = ranks or self.ranks or self.changing
        self.ranks = ranks
        self._shares.leave_out(ranks)
        return [
            LeaveOut(rank=rank, epoch=self._epoch, left_out=ranks, reason=reason)
            for rank in self._members
        ]

    def _say(self, reason: str) -> list[LeaveOut]:
        """A line for the user; nothing else changes."""
        return [
            LeaveOut(
                rank=self._first,
                epoch=self._epoch,
                left_out=self.ranks,
                reason=reason,
            )
        ]


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
