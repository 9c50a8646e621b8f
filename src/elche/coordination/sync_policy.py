"""``sync``: every global batch divided by delivered speed, reduced at every step.

Steps are granted to all ranks alike and ahead of every rank's loader, so no rank ever
waits for a message and a change of shares names a step that nobody has drawn yet
(loop contract 8). Early grants are one step long, so that the first measurements count
at once; later ones cover about ``GRANT_S`` seconds. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from elche.cadence.balancer import Balancer, BalancerConfig
from elche.config import RunConfig
from elche.coordination.epoch_plan import EpochPlan
from elche.coordination.ledger import BatchSizes, EpochLedger
from elche.coordination.messages import (
    EpochLeft,
    Event,
    GrantSteps,
    Instruction,
    MetricsReported,
    StepsDone,
)
from elche.coordination.metrics import RankReport
from elche.coordination.policy import EpochTotals, Member, Outcome, Policy
from elche.errors import ProtocolError

GRANT_S = 0.1
MAX_GRANT_STEPS = 64
BREAK_PATIENCE_S = 60.0
ALL_RANKS = -1


class SyncPolicy(Policy):
    """Grants steps and sizes the shares of each.

    Args:
        config: the run's settings.
        members: all ranks, in order.
        min_share_samples: least samples of a rank that has any (2 where BatchNorm
            cannot train on one).
    """

    def __init__(
        self, config: RunConfig, members: Sequence[Member], min_share_samples: int
    ) -> None:
        self._world_size = len(members)
        self._ahead_steps = max(member.horizon_batches for member in members) + 2
        self._balancer = Balancer(
            BalancerConfig(
                world_size=self._world_size,
                min_share_samples=min_share_samples,
                speed_hints=config.speed_hints,
            )
        )
        self._is_deterministic = config.deterministic
        self._is_stopping = False
        self.measured_steps = 0
        self._step_s = math.inf
        self._epoch = -1
        self._ledger = EpochLedger(BatchSizes(()), [ALL_RANKS])
        self._totals = EpochTotals(-1, self._world_size, 0.0)
        self._grants: deque[GrantSteps] = deque()
        self._reports: dict[int, deque[StepsDone]] = {}
        self._granted_until = 0
        self._left: dict[int, int] = {}

    def begin_epoch(
        self, epoch: int, sizes: BatchSizes, now_s: float, plan: str = ""
    ) -> Outcome:
        """Grants the first steps."""
        self._epoch = epoch
        self._record = EpochPlan(
            policy="sync", world_size=self._world_size, sizes=list(sizes.runs)
        )
        self._planned: deque[tuple[int, int, list[int]]] | None = None
        if plan:
            recorded = EpochPlan.from_text(plan, "sync", self._world_size, sizes)
            self._planned = deque(recorded.steps)
        self._ledger = EpochLedger(sizes, [ALL_RANKS])
        self._totals = EpochTotals(epoch, self._world_size, now_s)
        self._grants.clear()
        self._reports = {rank: deque() for rank in range(self._world_size)}
        self._granted_until = 0
        self._left = {}
        return Outcome(self._top_up())

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Takes a report of steps, or a rank's early end of the epoch."""
        if isinstance(event, EpochLeft):
            return self._leave(event)
        if not isinstance(event, StepsDone):
            raise ProtocolError(f"sync: unexpected {type(event).__name__}")
        self._take(event)
        outcome = Outcome()
        while all(self._reports.values()):
            outcome.instructions.append(self._complete_grant(now_s))
        if self._left:
            return outcome
        outcome.instructions += self._top_up()
        if self._ledger.is_done:
            outcome.instructions += self._totals.end_epoch(
                range(self._world_size),
                now_s,
                anchor=1,
                plan=self._record.to_text(),
            )
            outcome.epoch_over = True
        return outcome

    @property
    def totals(self) -> EpochTotals:
        """What the ranks did in the epoch under way."""
        return self._totals

    @property
    def granted_until(self) -> int:
        """The first step that has not been granted."""
        return self._granted_until

    @property
    def is_drained(self) -> bool:
        """Whether every granted step has been run by all ranks."""
        return not self._grants

    def stop_granting(self) -> None:
        """Grants no more steps in this epoch: another policy takes over."""
        self._is_stopping = True

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Gives these ranks no share of later steps: they cost more than they bring."""
        self._balancer.leave_out(ranks)

    def costs_s(self) -> tuple[list[float], list[float]]:
        """Seconds per sample, and fixed seconds per step, of each rank."""
        return self._balancer.costs_s()

    def check(self) -> None:
        """Asserts that every step is in one place and reports match grants."""
        self._ledger.check()
        for rank, reports in self._reports.items():
            assert len(reports) <= len(self._grants), f"rank {rank} reports too much"

    def patience_s(self) -> float:
        """Ranks that left the epoch wait for the others only so long."""
        return BREAK_PATIENCE_S if self._left else math.inf

    def has_left(self, rank: int) -> bool:
        """Whether a rank's loop has left the epoch early."""
        return rank in self._left

    def owes(self, rank: int) -> bool:
        """A break owes nothing: there is no drift to commit."""
        return rank not in self._left

    def waiting_for(self) -> str:
        """Ranks that have not reported the oldest grant, or not left the epoch."""
        if self._left:
            others = sorted(set(range(self._world_size)) - set(self._left))
            return (
                f"ranks {others} to leave epoch {self._epoch}, as ranks "
                f"{sorted(self._left)} did after step {min(self._left.values())}; "
                "under policy 'sync' a loop must be left at the same step on every rank"
            )
        silent = [rank for rank, reports in self._reports.items() if not reports]
        return f"steps of ranks {silent} in epoch {self._epoch}"

    def _take(self, event: StepsDone) -> None:
        reports = self._reports[event.rank]
        if event.epoch != self._epoch or len(reports) >= len(self._grants):
            raise ProtocolError(f"rank {event.rank} reports steps it was not granted")
        grant = self._grants[len(reports)]
        if (event.start, event.stop) != (grant.start, grant.stop):
            raise ProtocolError(
                f"rank {event.rank} reports steps {event.start}..{event.stop - 1}, "
                f"granted were {grant.start}..{grant.stop - 1}"
            )
        samples = grant.shares[event.rank] * (grant.stop - grant.start)
        if event.samples != samples:
            raise ProtocolError(
                f"rank {event.rank} claims {event.samples} samples, granted {samples}"
            )
        reports.append(event)
        self._totals.add(
            event.stop - 1,
            RankReport(
                rank=event.rank,
                samples=event.samples,
                busy_s=event.busy_s,
                data_wait_s=event.data_wait_s,
                transfer_s=event.transfer_s,
                sync_wait_s=event.sync_wait_s,
                parameter_norm=event.parameter_norm or None,
                scalars=event.scalars,
            ),
        )

    def _complete_grant(self, now_s: float) -> MetricsReported:
        """All ranks have run the oldest grant: measure and commit it."""
        grant = self._grants.popleft()
        reports = [self._reports[rank].popleft() for rank in range(self._world_size)]
        self._ledger.train(ALL_RANKS, grant.start, grant.stop)
        self._ledger.close(ALL_RANKS)
        self._ledger.stage()
        self._ledger.commit()
        passes = [report.backward_passes for report in reports]
        if len(set(passes)) > 1:
            raise ProtocolError(
                f"ranks ran different numbers of backward passes up to step "
                f"{grant.stop - 1}: {passes}; under policy 'sync' a batch may only be "
                "skipped on every rank, because their gradients are summed step by step"
            )
        steps = grant.stop - grant.start
        if all(report.warm for report in reports) and not self._is_deterministic:
            self._balancer.report(
                [report.samples // steps for report in reports],
                [report.busy_s / steps for report in reports],
            )
            self._step_s = max(report.busy_s for report in reports) / steps
            self.measured_steps += steps
        sync_s = max(report.sync_wait_s for report in reports)
        return self._totals.close_window(grant.stop - 1, now_s, 0, sync_s, steps)

    def _top_up(self) -> list[Instruction]:
        """Grants steps until the loaders' horizon and two grants are covered."""
        instructions: list[Instruction] = []
        steps = 1
        if self._step_s > 0 and math.isfinite(self._step_s):
            steps = min(MAX_GRANT_STEPS, max(1, math.ceil(GRANT_S / self._step_s)))
        while self._ledger.pooled and not self._is_stopping:
            ahead = self._ledger.leased(ALL_RANKS)
            oldest = self._grants[0].stop - self._grants[0].start if ahead else 1
            if ahead >= self._ahead_steps + (oldest - 1) + (steps - 1):
                break
            start, stop, shares = self._next_steps(steps)
            self._record.steps.append((start, stop, list(shares)))
            self._granted_until = stop
            for rank in range(self._world_size):
                grant = GrantSteps(
                    rank=rank,
                    epoch=self._epoch,
                    start=start,
                    stop=stop,
                    shares=tuple(shares),
                )
                instructions.append(grant)
            self._grants.append(grant)
        return instructions

    def _next_steps(self, most: int) -> tuple[int, int, Sequence[int]]:
        """The next steps and their shares: as planned, or as speeds are now."""
        if self._planned:
            start, stop, shares = self._planned.popleft()
            self._ledger.lease_range(ALL_RANKS, start, stop)
            return start, stop, shares
        start, stop = self._ledger.lease(ALL_RANKS, most, equal_sizes=True)
        samples, _ = self._ledger.sizes.run_of(start)
        return start, stop, self._balancer.sizes(samples)

    def _leave(self, event: EpochLeft) -> Outcome:
        """A loop's early end; it must come at the same step on every rank."""
        if event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} leaves epoch {event.epoch}")
        self._left[event.rank] = event.step
        steps = set(self._left.values())
        if len(steps) > 1:
            raise ProtocolError(
                "under policy 'sync' a loop may only be left at the same step on "
                f"every rank, but the ranks left after steps {self._left}; decide the "
                "break from values that all ranks share"
            )
        return Outcome(epoch_over=len(self._left) == self._world_size)
