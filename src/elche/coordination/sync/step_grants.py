"""Grants of steps under ``sync``: their number, lead and shares. Pure.

All ranks are granted the same steps, ahead of every rank's loader. So no rank waits
for a message, and new shares begin at a step that no loader has drawn yet. Early grants
are one step long, so that the first measurements count at once; later ones cover about
``GRANT_S`` seconds. The first steps of unequal devices are granted one by one: their
shares are guesses, and waiting for a message costs less than another step at the
slowest device's speed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import final

from elche.coordination.accounts.batch_ranges import BatchSizes, Range
from elche.coordination.accounts.metrics import RankReport
from elche.coordination.agreement import Settings
from elche.coordination.policy import Member
from elche.coordination.protocol.events import EpochLeft, StepsDone
from elche.coordination.protocol.instructions import GrantBatches
from elche.coordination.sync.left_out import ExcludedRanks
from elche.coordination.sync.step_reports import EARLY
from elche.coordination.sync.step_shares import StepShares
from elche.errors import ProtocolError

GRANT_S = 0.1
MAX_GRANT_STEPS = 64


@dataclass(slots=True)
class Granted:
    """A grant: consecutive steps with the same shares.

    Attributes:
        start: first step.
        stop: one past the last step.
        shares: samples of each rank in each step, 0 for a lost rank.
        owing: active members that have not reported the steps.
        reports: reports of the other members.
        is_settled: ranks of an earlier group hold the result; no more reports come.
        left: ranks whose loop left the epoch before the end of these steps.
        lost: ranks that have died, and whose part is missing.
    """

    start: int
    stop: int
    shares: tuple[int, ...]
    owing: set[int]
    reports: dict[int, StepsDone] = field(default_factory=dict)
    is_settled: bool = False
    left: set[int] = field(default_factory=set)
    lost: frozenset[int] = frozenset()

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.stop - self.start

    def work(self) -> list[RankReport]:
        """Returns each rank's work; only the samples for a rank without a report."""
        counted = {rank: report_of(each) for rank, each in self.reports.items()}
        for rank, share in enumerate(self.shares):
            if share and rank not in self.left:
                silent = RankReport(rank=rank, samples=share * self.steps)
                counted.setdefault(rank, silent)
        return [counted[rank] for rank in sorted(counted.keys() - self.lost)]

    def missing_parts(self) -> list[tuple[int, int, int]]:
        """Returns (step, first sample, one past the last) of the lost ranks' parts."""
        stops = list(accumulate(self.shares))
        return [
            (step, stops[rank] - share, stops[rank])
            for rank, share in enumerate(self.shares)
            if share and rank in self.lost
            for step in range(self.start, self.stop)
        ]


def report_of(event: StepsDone | EpochLeft) -> RankReport:
    """Returns a rank's work in steps, or since its last report if it leaves."""
    norm = event.parameter_norm if isinstance(event, StepsDone) else 0.0
    return RankReport(
        rank=event.rank,
        samples=event.samples,
        busy_s=event.busy_s,
        data_wait_s=event.data_wait_s,
        transfer_s=event.transfer_s,
        sync_wait_s=event.sync_wait_s,
        parameter_norm=norm or None,
        scalars=event.scalars,
    )


@final
class StepGrants:
    """Steps of an epoch, from their grant to their commit.

    Steps before ``committed_until`` are committed, those before ``until`` are granted,
    and later ones are free.

    Attributes:
        world_size: highest rank plus one.
        sizes: batch sizes of the epoch's steps.
        is_single: whether a step is granted only after the last one is done.
        fetches_early: whether loops request the next batch before a backward pass.
    """

    def __init__(
        self,
        members: Sequence[Member],
        settings: Settings,
        shares: StepShares,
        exclusion: ExcludedRanks,
    ) -> None:
        self._shares = shares
        self._exclusion = exclusion
        self._epoch = -1
        self.world_size = max(member.rank for member in members) + 1
        self._ahead_steps = max(member.horizon_batches for member in members) + 2
        self._granted: deque[Granted] = deque()  # uncommitted, oldest first
        self.sizes = BatchSizes(())
        self.until = self.committed_until = 0
        self._step_s = math.inf
        self._has_granted_nothing = False
        self.is_single = self.fetches_early = False
        is_known = shares.is_fixed or settings.config.speed_hints is not None
        self._guesses = not is_known and len({member.device for member in members}) > 1

    def __bool__(self) -> bool:
        """True if any granted step is open."""
        return bool(self._granted)

    @property
    def ungranted(self) -> int:
        """Steps of the epoch that have not been granted."""
        return self.sizes.num_batches - self.until

    @property
    def positions_left(self) -> list[Range]:
        """Positions of the steps that have not been granted."""
        first = self.sizes.position_of(self.until)
        return [(first, self.sizes.num_samples)] if self.ungranted else []

    @property
    def oldest(self) -> Granted | None:
        """Oldest grant, which is completed next."""
        return self._granted[0] if self._granted else None

    def begin_epoch(self, epoch: int, sizes: BatchSizes) -> None:
        """Starts an epoch without grants."""
        self._epoch = epoch
        self._granted.clear()
        self.sizes = sizes
        self.until = self.committed_until = 0
        self._has_granted_nothing = False

    def follow(self, members: Mapping[int, int]) -> None:
        """Adopts new members, each with its loader's horizon."""
        self.world_size = max(self.world_size, max(members) + 1)
        self._ahead_steps = max(members.values()) + 2

    def take(self, report: StepsDone) -> None:
        """Records a rank's report of its oldest unreported grant.

        Raises:
            ProtocolError: the rank was not granted these steps.
        """
        rank = report.rank
        grant = next((each for each in self._granted if rank in each.owing), None)
        if grant is None:
            raise ProtocolError(f"rank {rank} reports steps it was not granted")
        if (report.start, report.stop) != (grant.start, grant.stop):
            raise ProtocolError(
                f"rank {rank} reports steps {report.start}..{report.stop - 1}, but "
                f"was granted {grant.start}..{grant.stop - 1}"
            )
        samples = grant.shares[rank] * grant.steps
        if report.samples != samples:
            raise ProtocolError(
                f"rank {rank} claims {report.samples} samples, granted {samples}"
            )
        grant.reports[rank] = report
        grant.owing.remove(rank)
        self.fetches_early |= report.unknown == EARLY

    def remove(self, rank: int) -> None:
        """Removes a lost rank, whose reports are not waited for any more."""
        for grant in self._granted:
            grant.owing.discard(rank)

    def leave(self, event: EpochLeft) -> None:
        """Records that a rank's loop left the epoch, and its last report.

        Raises:
            ProtocolError: the claimed work was not granted, or times are not finite.
        """
        owed = [grant for grant in self._granted if event.rank in grant.owing]
        samples = sum(
            grant.shares[event.rank] * max(0, min(grant.stop, event.step) - grant.start)
            for grant in owed
        )
        times_s = event.busy_s, event.data_wait_s, event.transfer_s, event.sync_wait_s
        if event.samples != samples or not all(map(math.isfinite, times_s)):
            raise ProtocolError(
                f"rank {event.rank} left epoch {event.epoch} after step {event.step} "
                f"and claims {event.samples} samples in {times_s} s since its last "
                f"report, but was granted {samples}"
            )
        for grant in owed:
            grant.owing.remove(event.rank)
            grant.left.add(event.rank)

    def complete(self) -> Granted:
        """Commits the oldest grant, which all ranks have run."""
        grant = self._granted.popleft()
        self.committed_until = grant.stop
        return grant

    def measured(self, step_s: float) -> None:
        """Records the step time of the slowest rank."""
        self._step_s = step_s or math.inf

    def settle(self, done: int, lost: Mapping[int, int]) -> None:
        """Keeps steps before ``done`` and voids later ones after a regroup.

        Args:
            done: first step that is not in the common model.
            lost: by lost rank, the first step that lacks its part.
        """
        kept: deque[Granted] = deque()
        for grant in self._granted:
            cuts = (done, *lost.values())
            inside = {cut for cut in cuts if grant.start < cut < grant.stop}
            start = grant.start
            for stop in sorted({grant.stop, *inside}):
                if start >= done:
                    break
                is_whole = (start, stop) == (grant.start, grant.stop)
                gone = {rank for rank, first in lost.items() if first <= start}
                part = replace(
                    grant,
                    start=start,
                    stop=stop,
                    owing=set(),
                    reports=grant.reports if is_whole else {},
                    is_settled=True,
                    lost=grant.lost | gone,
                )
                kept.append(part)
                start = stop
        self._granted = kept
        self.until = max(done, self.committed_until)

    def top_up(self, ranks: Collection[int]) -> list[GrantBatches]:
        """Grants steps until the loaders' horizon and two grants are covered."""
        replies: list[GrantBatches] = []
        exclusion = self._exclusion
        self._guesses &= self._step_s == math.inf or not self._shares.balancer.is_warm
        is_single = self.is_single or self._guesses or exclusion.is_trying
        steps = min(MAX_GRANT_STEPS, max(1, math.ceil(GRANT_S / self._step_s)))
        steps = 1 if is_single or exclusion.changing else steps  # a cold one first
        while self.ungranted and not exclusion.is_leaving:
            ahead = self.until - self.committed_until
            oldest = self.oldest.steps if self.oldest is not None else 1
            most = self._ahead_steps + (oldest - 1) + (steps - 1)
            if ahead >= (1 if is_single else most) + self.fetches_early:
                break
            start, (samples, run_end) = self.until, self.sizes.run_of(self.until)
            trial = self._shares.trial(samples, self.world_size, ahead)
            shares = trial or self._shares.of(samples, self.world_size)
            self.until = stop = min(start + (1 if trial else steps), run_end)
            self._has_granted_nothing = False
            replies += self._grant(ranks, start, stop, shares)
            self._granted.append(Granted(start, stop, shares, {*ranks}))
        return replies

    def grant_nothing(self, ranks: Collection[int]) -> list[GrantBatches]:
        """Grants nothing to loops that fetch early, so that they do not wait.

        Such a loop reports its last step with the next grant, which waits for that
        report. The empty grant avoids the deadlock.
        """
        waits = self.fetches_early and self._granted and self.ungranted
        if not waits or self._has_granted_nothing:
            return []
        self._has_granted_nothing = True
        return self._grant(ranks, self.until, self.until, ())

    def _grant(
        self, ranks: Collection[int], start: int, stop: int, shares: tuple[int, ...]
    ) -> list[GrantBatches]:
        common = dict(epoch=self._epoch, start=start, stop=stop)
        return [GrantBatches(rank=r, shares=shares, **common) for r in sorted(ranks)]

    def check(self, members: Set[int]) -> None:
        """Asserts that each step is in one place, and only members owe reports."""
        at = self.committed_until
        for grant in self._granted:
            assert grant.start == at
            assert grant.owing <= members
            at = grant.stop
        assert at == self.until <= self.sizes.num_batches
