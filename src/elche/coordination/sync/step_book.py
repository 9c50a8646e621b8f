"""Steps of ``sync`` granted alike, and the ranks that ran them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from elche.coordination.accounts.metrics import RankReport
from elche.coordination.protocol.events import EpochLeft, StepsDone


@dataclass(slots=True)
class Granted:
    """Some steps, split alike.

    Attributes:
        start: the first.
        stop: one past the last.
        shares: samples of each rank in each of them, 0 for one that is gone.
        owing: members that take part in them and have yet to report.
        reports: of the others.
        is_settled: ranks of an earlier group hold their result; no more reports come.
        left: ranks whose loop has left the epoch before the end of these steps.
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
        """Work of each rank in the steps; the samples of one that did not report."""
        counted = {rank: report_of(each) for rank, each in self.reports.items()}
        for rank, share in enumerate(self.shares):
            if share and rank not in self.left:
                silent = RankReport(rank=rank, samples=share * self.steps)
                counted.setdefault(rank, silent)
        return [counted[rank] for rank in sorted(counted.keys() - self.lost)]

    def missing_parts(self) -> list[tuple[int, int, int]]:
        """(step, first sample, one past the last) of what lost ranks did not bring."""
        stops = list(accumulate(self.shares))
        return [
            (step, stops[rank] - share, stops[rank])
            for rank, share in enumerate(self.shares)
            if share and rank in self.lost
            for step in range(self.start, self.stop)
        ]


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
