"""Steps of ``sync`` granted and not committed, and the ranks that ran them. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from elche.coordination.accounts.metrics import RankReport
from elche.coordination.protocol.events import EpochLeft, StepsDone
from elche.errors import ProtocolError

NOBODY: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class Granted:
    """Some steps, split alike.

    Attributes:
        start: the first.
        stop: one past the last.
        shares: samples of each rank in each of them, 0 for one that is gone.
        missing: members that have not reported them.
        reports: of the others.
        is_settled: ranks of an earlier group hold their result; no more reports come.
        left: ranks whose loop has left the epoch before the end of these steps.
        left_out: ranks that were not granted them.
        lost: ranks that have died, and whose part is missing.
    """

    start: int
    stop: int
    shares: tuple[int, ...]
    missing: int
    reports: dict[int, StepsDone] = field(default_factory=dict)
    is_settled: bool = False
    left: set[int] = field(default_factory=set)
    left_out: tuple[int, ...] = ()
    lost: frozenset[int] = frozenset()

    @property
    def steps(self) -> int:
        """How many."""
        return self.stop - self.start

    def work(self) -> list[RankReport]:
        """What each rank did in them; of one that did not report, its samples."""
        done = []
        for rank, share in enumerate(self.shares):
            report = self.reports.get(rank)
            if rank in self.lost:
                continue
            if report is None:
                if share and rank not in self.left:
                    done.append(RankReport(rank=rank, samples=share * self.steps))
            else:
                done.append(report_of(report))
        return done

    def missing_parts(self) -> list[tuple[int, int, int]]:
        """(step, first sample, one past the last) of what lost ranks did not bring."""
        parts = []
        for rank in sorted(self.lost):
            share = self.shares[rank] if rank < len(self.shares) else 0
            start = sum(self.shares[:rank])
            if share:
                parts += [
                    (step, start, start + share)
                    for step in range(self.start, self.stop)
                ]
        return parts


class StepBook:
    """Grants under way, oldest first."""

    def __init__(self) -> None:
        self._grants: deque[Granted] = deque()

    def __bool__(self) -> bool:
        """Whether any steps are under way."""
        return bool(self._grants)

    @property
    def oldest(self) -> Granted | None:
        """The grant that is completed next."""
        return self._grants[0] if self._grants else None

    def grant(
        self,
        start: int,
        stop: int,
        shares: tuple[int, ...],
        ranks: int,
        left_out: tuple[int, ...] = (),
    ) -> None:
        """Steps were granted to so many ranks, and not to those left out."""
        self._grants.append(Granted(start, stop, shares, ranks, left_out=left_out))

    def take(self, event: StepsDone) -> None:
        """A rank has run its part of the next grant that it owes.

        Raises:
            ProtocolError: it was not given that.
        """
        rank = event.rank
        grant = next((g for g in self._grants if _owes(g, rank)), None)
        if grant is None:
            raise ProtocolError(f"rank {rank} reports steps it was not granted")
        if (event.start, event.stop) != (grant.start, grant.stop):
            raise ProtocolError(
                f"rank {rank} reports steps {event.start}..{event.stop - 1}, "
                f"granted were {grant.start}..{grant.stop - 1}"
            )
        samples = grant.shares[rank] * grant.steps
        if event.samples != samples:
            raise ProtocolError(
                f"rank {rank} claims {event.samples} samples, granted {samples}"
            )
        grant.reports[rank] = event
        grant.missing -= 1

    def pop(self) -> Granted:
        """The oldest grant is complete."""
        return self._grants.popleft()

    def clear(self) -> None:
        """Begins an epoch."""
        self._grants.clear()

    def remove(self, rank: int) -> None:
        """A rank is gone: its reports are not waited for any more."""
        for grant in self._grants:
            grant.missing -= _owes(grant, rank)

    def leave(self, rank: int) -> None:
        """A rank's loop has left the epoch: it reports no more, and trains no more."""
        for grant in self._grants:
            if _owes(grant, rank):
                grant.missing -= 1
                grant.left.add(rank)

    def settle(self, done: int, lost: Mapping[int, int] = NOBODY) -> None:
        """The group has changed: steps before ``done`` are done, later ones void.

        Args:
            done: the first that is not.
            lost: ranks whose part is missing, each from a step on.
        """
        kept: deque[Granted] = deque()
        for grant in self._grants:
            cuts = (done, *lost.values())
            inside = {cut for cut in cuts if grant.start < cut < grant.stop}
            start = grant.start
            for stop in sorted({grant.stop, *inside}):
                if start >= done:
                    break
                part = replace(grant, start=start, stop=stop, is_settled=True)
                if (start, stop) != (grant.start, grant.stop):
                    part.reports = {}
                gone = {rank for rank, first in lost.items() if first <= start}
                part.lost = grant.lost | gone
                kept.append(part)
                start = stop
        self._grants = kept

    def check_part(self, event: EpochLeft) -> None:
        """Refuses a claim of work that a rank which leaves early was not given.

        Raises:
            ProtocolError: it has not run that, or its times are not finite.
        """
        owed = sum(
            grant.shares[event.rank] * max(0, min(grant.stop, event.step) - grant.start)
            for grant in self._grants
            if _owes(grant, event.rank)
        )
        times_s = (
            *(event.busy_s, event.data_wait_s),
            *(event.transfer_s, event.sync_wait_s),
        )
        if event.samples != owed or not all(map(math.isfinite, times_s)):
            raise ProtocolError(
                f"rank {event.rank} left epoch {event.epoch} after step {event.step} "
                f"and claims {event.samples} samples in {times_s} s since its last "
                f"report, granted were {owed}"
            )

    def silent(self, members: Mapping[int, int]) -> list[int]:
        """Members that have not reported the oldest grant."""
        oldest = self.oldest
        return [] if oldest is None else [r for r in members if _owes(oldest, r)]


def report_of(event: StepsDone | EpochLeft) -> RankReport:
    """What a rank did in steps, or since its last report if it leaves."""
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


def _owes(grant: Granted, rank: int) -> bool:
    settled = grant.is_settled or rank in grant.left or rank in grant.left_out
    return not settled and rank not in grant.reports
