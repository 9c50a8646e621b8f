"""Exclusion of stragglers from steps of ``sync``. Pure.

A rank makes every step longer if its least share, or its link, takes longer than the
other ranks' whole step. The step time with it is measured. The step time without it is
predicted from the ranks' time models, and measured after the exclusion. An excluded
rank takes part in each epoch's first step and copies the model at the epoch's end.
Trials measure whether it has become fast enough, with its former times forgotten; they
cost at most 2 % of the time, and each failed trial doubles the time to the next.

If a rank's batches change state that elche cannot copy (`STALE`), the exclusion is
final: the rank's part of each epoch's first step is empty, and no trial follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from statistics import mean, median
from typing import NamedTuple, final

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import LeaveOut
from elche.coordination.sync.step_reports import STALE, UNEVEN
from elche.coordination.sync.step_shares import StepShares
from elche.errors import named_ranks

LEAST_GAIN = 0.1
"""Least cut of step time, as a fraction, for which a rank is excluded."""
TRIAL_COST = 0.02
"""Budget of trials: fraction of the time since the last trial."""
CARRYING_S = 0.1
"""Assumed time (s) of copying the model to excluded ranks, until measured."""
SETTLING_GRANTS = 4
"""Grants after a change that are not measured: shares still move."""
TRIAL_WARM_UP = 2
"""Steps of a trial after which the times of the tried ranks are forgotten."""
MEASURED_GRANTS, MEASURED_S, LEAST_GRANTS = 4, 0.5, 3
"""Least grants and seconds that are measured for a step time; a trial's are short. One
that takes so many seconds alone counts as two, here and while shares settle, but so
many there are at least.
"""


class _Phase(Enum):
    """Phases of an exclusion, with their transitions.

    ==========================================  ===================  =========
    event                                       from                 to
    ==========================================  ===================  =========
    measured twice in a row: some save no time  MEASURING, APART     LEAVING
    an epoch begins, and some saved no time     MEASURING            TRIAL
    an epoch begins                             LEAVING, APART       TRIAL
    its first step is done                      TRIAL                LEAVING
    some steps show that all ranks save time    TRIAL                MEASURING
    the membership has changed                  any but OFF          MEASURING
    it has changed, and exclusions are final    any but OFF          APART
    ==========================================  ===================  =========

    A loop without a batch in an epoch may fail (a mean over none, for example), so each
    rank takes part in an epoch's first step. An epoch is cut for a trial that is due.
    """

    OFF = "all keep a share to the end of the run"
    MEASURING = "all take part and are measured"
    LEAVING = "the steps that are granted already; then some are excluded"
    APART = "some are excluded, and the others are measured"
    TRIAL = "all take part in an epoch's first step, or in some to see what they cost"


class _Measured(NamedTuple):
    """Measured steps of a grant: time (s) of a step, and of its visible reduction.

    ``reduce_s`` is the first rank's time (s) for reductions inside its compute.
    """

    steps: int
    step_s: float
    shown_s: float
    reduce_s: float = 0.0

    @property
    def taken_s(self) -> float:
        return self.steps * self.step_s

    @property
    def grants(self) -> int:
        return 2 if self.taken_s >= MEASURED_S else 1


@dataclass(frozen=True, slots=True)
class _Exclusion:
    """Ranks to exclude, with the time (s) of a step with and without them."""

    ranks: tuple[int, ...]
    with_s: float
    without_s: float

    @property
    def gain(self) -> float:
        """Speedup by the exclusion: ratio of the step times."""
        return self.with_s / self.without_s

    def __str__(self) -> str:
        them = "it" if len(self.ranks) == 1 else "them"
        return (
            f"{named_ranks(self.ranks)} excluded: steps of {1e3 * self.with_s:.3g} ms "
            f"take {1e3 * self.without_s:.3g} ms without {them} ({self.gain:.2f} times "
            f"as fast); the model is copied to {them} at the end of every epoch"
        )


@final
class ExcludedRanks:
    """Decides which ranks are excluded from steps, and when that changes.

    Attributes:
        ranks: excluded ranks, ascending.
        changing: ranks that are being excluded or readmitted, until the active ranks
            have run a step and so are in one group.
        unknown: by rank, the state that cannot be copied to another rank, or "".
        final: excluded ranks that lack state, and never return.
        carrying_s: time (s) in which a rank copies the model.
    """

    def __init__(
        self, members: Sequence[int], settings: Settings, shares: StepShares
    ) -> None:
        config = settings.config
        self._members = list(members)
        self._shares = shares
        # Columns of fixed shares stay on their rank.
        self._is_allowed = config.leave_out and len(members) > 1 and not shares.is_fixed
        is_on = self._is_allowed and config.policy == "sync"
        self._phase = _Phase.MEASURING if is_on else _Phase.OFF
        self.unknown: dict[int, str] = {}
        self.ranks: tuple[int, ...] = ()
        self.changing: tuple[int, ...] = ()
        self.final: tuple[int, ...] = ()
        self._recent: list[_Measured] = []
        self._settling = SETTLING_GRANTS
        self._suspects: _Exclusion | None = None
        self._agreed: _Exclusion | None = None  # found twice in a row
        self._chosen = _Exclusion((), 0.0, 0.0)
        self._epoch, self._samples, self._steps_left = -1, 0, 0
        self._biases: dict[bool, float] = {}  # of predictions; True: of one rank alone
        self.carrying_s = CARRYING_S
        self._now_s = self._all_s = self._trial_due_s = 0.0
        self._tried_s, self._pause_s = float("-inf"), 0.0
        self._announced: tuple[tuple[int, ...], ...] = ()
        self._has_announced = self._decides = self._waits = False
        self._is_auto, self._is_stream = config.policy == "auto", settings.is_stream

    def allow(
        self, ranks: tuple[int, ...], with_s: float, without_s: float
    ) -> list[LeaveOut]:
        """Starts exclusions under ``auto``, which chose steps without these ranks.

        Args:
            ranks: ranks to exclude; none if all ranks save time.
            with_s: time (s) of a step with them.
            without_s: time (s) of a step without them.
        """
        if not self._is_allowed or self._phase is not _Phase.OFF:
            return []
        self._enter(_Phase.MEASURING)
        if not ranks:
            return []
        return self._choose(_Exclusion(ranks, with_s, without_s))

    def stop(self) -> None:
        """Ends exclusions as ``auto`` leaves the steps; all ranks take later steps."""
        self.reset(self._members)
        self._shares.exclude(())
        self._phase = _Phase.OFF

    @property
    def is_leaving(self) -> bool:
        """True until :meth:`leave`; no steps are granted meanwhile."""
        return self._phase is _Phase.LEAVING

    @property
    def is_on(self) -> bool:
        """True if some ranks are excluded, or about to be."""
        return bool(self.ranks) or self.is_leaving

    @property
    def is_trying(self) -> bool:
        """True during a trial, in which steps are granted one by one."""
        return self._phase is _Phase.TRIAL

    @property
    def is_uneven(self) -> bool:
        """True if an excluded rank may step after other batches (see `UNEVEN`)."""
        return UNEVEN in self.unknown.values()

    @property
    def is_trial_due(self) -> bool:
        """True if the epoch is to be cut for a trial of excluded ranks."""
        returns = not (self.final or self._is_stream or self.is_uneven)
        if not (self.ranks and returns):
            return False
        chosen = self._chosen
        if chosen.with_s > chosen.without_s:
            return self._now_s >= self._trial_due_s and self._is_worth(chosen)
        undone = replace(chosen, with_s=chosen.without_s, without_s=chosen.with_s)
        return undone.gain > 1.0 + LEAST_GAIN and self._is_worth(undone)  # at once

    def begin_epoch(
        self, epoch: int, sizes: BatchSizes, now_s: float
    ) -> list[LeaveOut]:
        """Begins an epoch; excluded ranks take part in its first step or a trial."""
        is_rest, self._epoch = epoch == self._epoch, epoch
        self._samples = sizes.runs[0][0]
        since_s = self._now_s if is_rest else now_s  # a cut takes time as well
        self._steps_left, self._now_s = sizes.num_batches, now_s
        self._note_stale()
        replies: list[LeaveOut] = []
        decides, found = False, self._agreed
        if self._phase is _Phase.APART:
            is_worth = self._is_worth(self._chosen)
            is_due = now_s >= self._trial_due_s or not is_worth
            decides = is_due and not (self.final or (is_rest and self.is_uneven))
            self._tried_s = since_s if decides else self._tried_s
        elif found is not None and self._is_worth(found):
            replies = self._choose(found)
        if self._phase in (_Phase.LEAVING, _Phase.APART):
            self._enter(_Phase.TRIAL)  # a running trial continues
            self._decides = decides
            return self._set(())
        return replies

    def leave(self) -> list[LeaveOut]:
        """Applies the chosen exclusion; called when no granted step is open."""
        chosen = self._chosen
        self._enter(_Phase.APART)
        self.ranks = chosen.ranks
        self._note_stale()
        before, self._announced = self._announced, (chosen.ranks, self.final)
        returns = "all ranks are retried now and then"
        if self.final:
            returns = f"none returns, because {self._stale}"
        line = f"{chosen}, and {returns} (leave_out=False keeps all)"
        return self._set(chosen.ranks, line if before != self._announced else "")

    def measured(
        self, reports: Sequence[StepsDone], steps: int, steps_left: int, now_s: float
    ) -> list[LeaveOut]:
        """Records the active ranks' reports of a grant; may change the exclusion.

        Args:
            reports: reports of all active ranks; cold ones are not measured.
            steps: number of steps in the grant.
            steps_left: number of the epoch's steps that are not granted.
            now_s: current time.
        """
        if self._phase in (_Phase.OFF, _Phase.LEAVING):
            return []
        self._steps_left, self._now_s = steps_left, now_s
        self._note_stale()
        if self.is_trying and self._kept and not self.final:
            self._enter(_Phase.MEASURING)  # new in this epoch: no rank is behind yet
        elif self.is_trying and (not self._decides or self._kept or self._stale):
            self._phase = _Phase.LEAVING
        elif self.is_trying and self._settling > SETTLING_GRANTS - TRIAL_WARM_UP:
            self._settling -= 1
            self._shares.forget(self._chosen.ranks)
        elif all(each.warm for each in reports):
            step_s = max(each.busy_s + each.sync_wait_s for each in reports) / steps
            shown_s = min(each.sync_wait_s for each in reports) / steps
            reduce_s = reports[0].reduce_s / steps
            return self._record(_Measured(steps, step_s, shown_s, reduce_s))
        return []

    def _record(self, measured: _Measured) -> list[LeaveOut]:
        if self._settling > 0:
            self._settling -= measured.grants
            return []
        self._recent.append(measured)
        taken_s = sum(each.taken_s for each in self._recent)
        is_long = self.is_trying or taken_s >= MEASURED_S
        is_long &= sum(each.grants for each in self._recent) >= MEASURED_GRANTS
        if not is_long or len(self._recent) < LEAST_GRANTS:
            return []
        # Not the longest. No median: a rank with a quota of its processor stalls only
        # some steps.
        usual = sorted(self._recent, key=attrgetter("step_s"))[:-1]
        usual_s = sum(each.taken_s for each in usual)
        replies = self._look(usual_s / sum(each.steps for each in usual))
        self._recent.clear()
        return replies

    def _look(self, step_s: float) -> list[LeaveOut]:
        """Decides by the measured step time; excludes ranks found twice in a row."""
        before = self._chosen
        is_alone = self._is_alone(before.ranks)
        if self._phase is _Phase.APART:
            before = self._chosen = replace(before, without_s=step_s)
        elif not self.is_trying and self._now_s >= self._trial_due_s:
            self._biases.clear()  # speeds may have changed since
        is_known = before.ranks and is_alone in self._biases and not self.is_trying
        if self.ranks or is_known:  # measured without them, whatever is predicted
            predicted_s = self._shares.step_s(self._samples, before.ranks)
            self._biases[is_alone] = max(1.0, before.without_s / predicted_s)
        found = self._shorter(step_s)
        if self.is_trying:
            if found is None and min(step_s, before.with_s) >= before.without_s:
                found = replace(before, with_s=step_s)
            if found is not None and self._is_worth(found):
                return self._choose(found)
            self._enter(_Phase.MEASURING)
            if found is not None:
                self._agreed = found  # excluded in the next epoch
                return []
            self._announced, gain = (), before.without_s / step_s
            takes = "takes" if len(before.ranks) == 1 else "take"
            who = named_ranks(before.ranks)
            why = f"{gain:.2f} times as fast" if gain > 1.0 else "no time was saved"
            return self._announce(f"{who} {takes} part again: {why}")
        agreed = self._agreed = found if self._suspects is not None else None
        self._suspects = found
        # Without all ranks auto does not measure what windows would gain.
        self._waits |= self._is_auto and found is None and not self.ranks
        if agreed is None or self._waits or not self._is_worth(agreed):
            return []
        return self._choose(agreed)

    def reset(self, members: Sequence[int]) -> None:
        """Restarts measuring with all members after a membership change."""
        self.ranks = self.changing = ()
        self._members = list(members)
        self.final = tuple(rank for rank in self.final if rank in members)
        self._chosen = replace(self._chosen, ranks=self.final)
        if self._phase is not _Phase.OFF:
            self._enter(_Phase.APART if self.final else _Phase.MEASURING)

    def _enter(self, phase: _Phase) -> None:
        """Enters a phase and discards measurements of the last one."""
        self._phase = phase
        self._recent.clear()
        self._settling, self._waits = SETTLING_GRANTS, False
        self._suspects = self._agreed = None

    def _choose(self, found: _Exclusion) -> list[LeaveOut]:
        """Starts an exclusion, unless it would lose state or exclude the first rank."""
        if not self._kept and self._first not in found.ranks:
            if not self.ranks:  # else with_s is of steps without those ranks
                self._all_s = found.with_s
            steps = SETTLING_GRANTS + MEASURED_GRANTS
            equal = self._samples // len(self._members)
            equal_s = self._shares.given_s(self._samples, equal)
            slow_s = max(self._all_s, *(equal_s[rank] for rank in found.ranks))
            cost_s = TRIAL_WARM_UP * slow_s
            cost_s += (steps - TRIAL_WARM_UP) * self._all_s
            cost_s += 2 * self.carrying_s - steps * found.without_s
            pause_s, tried_s = cost_s / TRIAL_COST, self._now_s - self._tried_s
            if tried_s < self._pause_s:  # the last trial failed, or was wrong
                pause_s = max(pause_s, 2.0 * self._pause_s, tried_s / TRIAL_COST)
            self._pause_s, self._trial_due_s = pause_s, self._now_s + pause_s
            self._phase, self._chosen = _Phase.LEAVING, found
            return []
        if self.is_trying:
            self._enter(_Phase.MEASURING)
        if self.ranks or self._has_announced:
            return []
        self._has_announced = True
        why = self._kept or "this rank is never excluded; start it on a faster device"
        return self._announce(
            f"steps are predicted to be {found.gain:.2f} times as fast without "
            f"{named_ranks(found.ranks)}, but all keep a share: {why}"
        )

    @property
    def _kept(self) -> str:
        """State because of which no rank may be excluded; "" if there is none."""
        unknown = filter(None, self.unknown.values())
        return next((each for each in unknown if each not in (*STALE, UNEVEN)), "")

    @property
    def _stale(self) -> str:
        """State that excluded ranks lack from now on; "" if there is none."""
        return next((each for each in self.unknown.values() if each in STALE), "")

    def _note_stale(self) -> None:
        if self.ranks and self._stale:
            self.final = self.ranks

    def _shorter(self, step_s: float) -> _Exclusion | None:
        """Returns ranks without which steps are predicted to be clearly shorter."""
        every = [self._without(ranks, step_s) for ranks in self._candidates()]
        if not every:
            return None
        hopeful = [min(every, key=attrgetter("without_s"))]
        if not self.ranks:  # the first rank is only reported as slow
            hopeful.append(self._without((self._first,), step_s))
        return next((each for each in hopeful if each.gain > 1.0 + LEAST_GAIN), None)

    def _is_worth(self, found: _Exclusion) -> bool:
        """True if the exclusion saves more in the epoch than a model copy costs."""
        saved_s = (self._steps_left - 1) * (found.with_s - found.without_s)
        return saved_s > 2 * self.carrying_s

    @property
    def _first(self) -> int:
        """The first rank, which prints and saves: it is never excluded."""
        return min(self._members)

    def _without(self, ranks: tuple[int, ...], step_s: float) -> _Exclusion:
        is_alone, reduce_s = self._is_alone(ranks), 0.0
        if is_alone and self._first not in ranks:  # it will reduce nothing
            reduce_s = median(each.reduce_s for each in self._recent)
        without_s = self._shares.step_s(self._samples, ranks, reduce_s)
        if is_alone in self._biases:
            without_s *= self._biases[is_alone]
        elif not is_alone:
            without_s += mean(each.shown_s for each in self._recent)
        return _Exclusion(ranks, step_s, without_s)

    def _is_alone(self, excluded: Sequence[int]) -> bool:
        """True if only one rank stays active, and so reduces with no other."""
        return len(excluded) == len(self._members) - 1

    def _candidates(self) -> Iterator[tuple[int, ...]]:
        """Yields the slowest rank, the two slowest, ...; never the first rank."""
        least_s = self._shares.given_s(self._samples)
        others = (r for r in self._members if r not in (self._first, *self.ranks))
        slowest = sorted(others, key=lambda r: (-least_s[r], -r))
        count = 0
        while count < len(slowest):
            count = min(count + 1 + count // 8, len(slowest))
            yield tuple(sorted((*self.ranks, *slowest[:count])))

    def _set(self, ranks: tuple[int, ...], reason: str = "") -> list[LeaveOut]:
        """Excludes exactly these ranks; returns the notifications to all members."""
        self.changing = ranks or self.ranks or self.changing
        self.ranks = ranks
        self._shares.exclude(ranks or self.final)
        return [
            LeaveOut(rank=rank, epoch=self._epoch, left_out=ranks, reason=reason)
            for rank in self._members
        ]

    def _announce(self, reason: str) -> list[LeaveOut]:
        """Returns a notification with a log line; the exclusion is unchanged."""
        rank, epoch = self._first, self._epoch
        return [LeaveOut(rank=rank, epoch=epoch, left_out=self.ranks, reason=reason)]
