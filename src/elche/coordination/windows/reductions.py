"""Reductions of windows: holders of the result, weights, and outer step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elche.config import RunConfig, default_outer_lr
from elche.coordination.accounts.schedule_steps import common_periods
from elche.coordination.protocol.events import ModelUpdated
from elche.coordination.protocol.instructions import Reduce
from elche.coordination.windows.window_book import Part
from elche.errors import ProtocolError

SETTLED_WINDOWS = 8
FEW_WINDOWS = 4


@dataclass(slots=True)
class Reduction:
    """One reduction: its plan, the ranks' work, and which ranks have its result.

    Attributes:
        plan: the plan for all ranks, without their weights.
        parts: each rank's work in the window.
        begun_s: time at which all ranks had closed the window; None if the reduction
            is not timed by it.
        diverged: ranks whose waits are excluded from pacing; see `Part`.
        missing: ranks that have not reported the result yet.
        reports: reports of the other ranks.
    """

    plan: Reduce
    parts: dict[int, Part]
    begun_s: float | None = None
    diverged: frozenset[int] = field(init=False)
    missing: set[int] = field(init=False)
    reports: dict[int, ModelUpdated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.parts.items()
        self.diverged = frozenset(rank for rank, part in parts if part.is_diverged)
        self.missing = set(self.parts)

    def reduced(self, event: ModelUpdated) -> None:
        """Records that a rank has the result.

        Raises:
            ProtocolError: the report is of another window, or repeated.
        """
        if event.window != self.plan.window or event.rank not in self.missing:
            raise ProtocolError(
                f"rank {event.rank} reduced window {event.window} out of turn"
            )
        self.missing.discard(event.rank)
        self.reports[event.rank] = event

    def again(self, ranks: Iterable[int]) -> None:
        """Starts another attempt after a membership change; all ranks report again."""
        self.plan = replace(self.plan, attempt=self.plan.attempt + 1)
        self.begun_s = None
        self.missing = set(ranks)
        self.reports.clear()

    def remove(self, rank: int) -> None:
        """Removes a lost rank."""
        self.missing.discard(rank)
        self.reports.pop(rank, None)

    def cost_s(self, busy: Iterable[int]) -> tuple[float, float]:
        """Returns the cost (s) on busy ranks, and their mean wait for others.

        Idle ranks wait through the whole reduction, which costs nothing.
        """
        reports = [self.reports[rank] for rank in busy if rank in self.reports]
        reports = reports or list(self.reports.values())
        if not reports:
            return 0.0, 0.0
        wait_s = sum(report.wait_s for report in reports) / len(reports)
        return max(report.sync_s for report in reports), wait_s

    def instructions(self) -> list[Reduce]:
        """Returns each rank's plan; ranks with a weight above zero weigh the same."""
        counts = {rank: part.weight > 0 for rank, part in self.parts.items()}
        active = sum(counts.values())
        return [
            replace(
                self.plan,
                rank=rank,
                weight=counts / max(1, active),
                active_ranks=active,
            )
            for rank, counts in counts.items()
        ]


class ReductionPlanner:
    """Plans the reduction of each window."""

    def __init__(self, config: RunConfig, epochs: int | None) -> None:
        self._config = config
        self._epochs = epochs
        self._windows = 0
        self._outer = config.windows.outer.optimizer

    def plan(
        self,
        parts: Mapping[int, Part],
        epoch_batches: int,
        window_batches: int,
        **fields: Any,
    ) -> Reduce:
        """Returns a window's plan, without the ranks' weights.

        Args:
            parts: each rank's work in the window, as reported at its close.
            epoch_batches: number of batches in the epoch.
            window_batches: number of batches that El Che plans per window now.
            **fields: other fields of the plan.

        Raises:
            MismatchError: ranks registered different numbers of schedulers.
        """
        closed = {r: part.closed for r, part in parts.items() if part.closed}
        if not any(part.weight for part in parts.values()):
            kind = "average"  # no update to step along: momentum must not move it
        else:
            kind = self._outer_kind(epoch_batches, window_batches)
            self._windows += 1
        outer = self._config.windows.outer
        lr = outer.lr or default_outer_lr(len(parts), kind)
        return Reduce(
            rank=-1,
            attempt=0,
            weight=0.0,
            active_ranks=0,
            buffers=tuple(
                sorted({i for each in closed.values() for i in each.changed_buffers})
            ),
            outer=kind,
            outer_lr=1.0 if kind == "average" else lr,
            outer_momentum=outer.momentum,
            periods=common_periods({r: each.periods for r, each in closed.items()}),
            **fields,
        )

    def _outer_kind(self, epoch_batches: int, window_batches: int) -> str:
        """Returns Nesterov, or a plain average for runs too short for its momentum.

        The kind is decided again until El Che has settled.
        """
        is_auto = self._config.windows.outer.optimizer == "auto"
        if is_auto and self._windows < SETTLED_WINDOWS:
            known = None if self._epochs is None else epoch_batches * self._epochs
            short = known is not None and known < FEW_WINDOWS * window_batches
            self._outer = "average" if short else "nesterov"
        return self._outer
