"""Steps of ``sync`` granted alike, and the ranks that ran them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from elche.coordination.accounts.metrics import RankReport
from elche.coordination.protocol.events import EpochLeft, StepsDone


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

    def owes(self, rank: int) -> bool:
        """True if a member has yet to report them."""
        settled = self.is_settled or rank in self.left or rank in self.left_out
        return not settled and rank not in self.reports

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.stop - self.start

    def work(self) -> list[RankReport]:
        """Work of each rank in the steps; the samples of one that did not report."""
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


def report_of(event: StepsDone | EpochLeft) -> RankReport:
    """Work of a rank in steps, or since its last report if it leaves."""
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
