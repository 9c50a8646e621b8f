"""Reductions of windows: who has the result; plans of weights, outer step and state.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from elche.config import RunConfig, default_outer_lr
from elche.coordination.accounts.schedule_steps import common_periods
from elche.coordination.protocol.events import WindowReduced
from elche.coordination.protocol.instructions import Reduce
from elche.coordination.windows.window_book import Part
from elche.errors import ProtocolError, TransitionError

SETTLED_WINDOWS = 8
FEW_WINDOWS = 4


class Reduction:
    """One reduction under way: who has its result.

    Args:
        window: whose.
        ranks: who takes part.
        begun_s: when all ranks had closed the window; None where that says nothing
            about how long it takes.
        diverged: ranks whose waits are left out of pacing; see `Part`.

    Attributes:
        copies: samples by which each copy of the model is behind it.
        mean_over: see `Reduce`.
    """

    def __init__(
        self,
        window: int,
        ranks: Iterable[int],
        *,
        begun_s: float | None = None,
        diverged: frozenset[int] = frozenset(),
    ) -> None:
        self.window = window
        self.attempt = 0
        self.begun_s = begun_s
        self.diverged = diverged
        self.copies: tuple[int, ...] = ()
        self.mean_over = 1
        self.reports: dict[int, WindowReduced] = {}
        self.missing = set(ranks)

    @property
    def is_done(self) -> bool:
        """True if every rank has the result."""
        return not self.missing

    def reduced(self, event: WindowReduced) -> None:
        """A rank has it.

        Raises:
            ProtocolError: it is of another window, or was said twice.
        """
        if event.window != self.window or event.rank not in self.missing:
            raise ProtocolError(
                f"rank {event.rank} reduced window {event.window} out of turn"
            )
        self.missing.discard(event.rank)
        self.reports[event.rank] = event

    def again(self, ranks: Iterable[int]) -> None:
        """All of these shall report once more: the membership has changed."""
        self.attempt += 1
        self.begun_s = None
        self.missing = set(ranks)
        self.reports.clear()

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        self.missing.discard(rank)
        self.reports.pop(rank, None)

    @property
    def sync_s(self) -> float:
        """Cost (s) on the rank that it cost most."""
        return max((report.sync_s for report in self.reports.values()), default=0.0)

    def cost_s(self, busy: Iterable[int]) -> tuple[float, float]:
        """Cost (s) on ranks that had work meanwhile, and their mean wait for others.

        One that has none waits through the whole of it, which costs nothing.
        """
        reports = [self.reports[rank] for rank in busy if rank in self.reports]
        reports = reports or list(self.reports.values())
        if not reports:
            return 0.0, 0.0
        wait_s = sum(report.wait_s for report in reports) / len(reports)
        return max(report.sync_s for report in reports), wait_s

    @property
    def divergences(self) -> list[float]:
        """Divergences of all ranks, in their order."""
        return [self.reports[rank].divergence for rank in sorted(self.reports)]


class Reductions:
    """The reduction that is running, at most one, and the last one that is done.

    ==================  =======  =======  ============================================
    call                from     to       when
    ==================  =======  =======  ============================================
    ``begin``           none     running  all ranks have closed a window
    ``commit``          running  none     all ranks hold its result
    ==================  =======  =======  ============================================

    Attributes:
        parts: what the ranks did in the window that was reduced last.
        settings: how it was reduced.
    """

    def __init__(self) -> None:
        self.running: Reduction | None = None
        self.last: Reduction | None = None
        self.parts: dict[int, Part] = {}
        self.settings: dict[str, Any] = {}

    def begin(
        self,
        window: int,
        parts: Mapping[int, Part],
        settings: dict[str, Any],
        begun_s: float | None,
    ) -> Reduction:
        """All ranks have closed a window.

        Raises:
            TransitionError: the last reduction is still running.
        """
        if self.running is not None:
            raise TransitionError(
                f"window {window} cannot be reduced: window {self.running.window} is"
            )
        diverged = frozenset(r for r, part in parts.items() if part.is_diverged)
        self.parts, self.settings = dict(parts), settings
        self.running = Reduction(window, parts, begun_s=begun_s, diverged=diverged)
        return self.running

    def leave_out_gone(self, members: Collection[int]) -> None:
        """Repeats the reduction without the parts of ranks that are gone."""
        self.parts = {r: part for r, part in self.parts.items() if r in members}

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        if self.running is not None:
            self.running.remove(rank)

    def commit(self) -> Reduction:
        """All ranks hold the result.

        Raises:
            TransitionError: they do not, or nothing is reduced.
        """
        done = self.running
        if done is None or not done.is_done:
            raise TransitionError("a reduction is committed before all hold its result")
        self.running, self.last = None, done
        return done


class ReductionPlanner:
    """Plans the reduction of each window.

    Args:
        config: the run's settings.
        epochs: epochs of the run if known; a short run averages plainly.
    """

    def __init__(self, config: RunConfig, epochs: int | None) -> None:
        self._config = config
        self._epochs = epochs
        self._windows = 0
        self._outer = config.windows.outer.optimizer

    def settings(
        self,
        parts: Mapping[int, Part],
        epoch_batches: int,
        window_batches: int,
    ) -> dict[str, Any]:
        """Fields of `Reduce` for a window, without the weights.

        Args:
            parts: what each rank did in it, and said when it closed it.
            epoch_batches: batches of the epoch.
            window_batches: batches that El Che plans for a window now.
        """
        closed = [part.closed for part in parts.values() if part.closed is not None]
        if not any(part.weight for part in parts.values()):
            kind = "average"  # nothing to step along: momentum must not move it
        else:
            kind = self._outer_kind(epoch_batches, window_batches)
            self._windows += 1
        lr = self._config.windows.outer.lr or default_outer_lr(len(parts), kind)
        return {
            "buffers": tuple(
                sorted({i for report in closed for i in report.changed_buffers})
            ),
            "outer": kind,
            "outer_lr": 1.0 if kind == "average" else lr,
            "outer_momentum": self._config.windows.outer.momentum,
        }

    def plan(
        self,
        parts: Mapping[int, Part],
        settings: Mapping[str, Any],
        epoch: int,
        reduction: Reduction,
    ) -> Iterator[Reduce]:
        """The reduction's instructions, one for each rank.

        Args:
            parts: what each rank did in the window.
            settings: from :meth:`settings`.
            epoch: the epoch.
            reduction: which window's, and which attempt.

        Raises:
            MismatchError: ranks have handed over other numbers of schedulers.
        """
        counts = [part.weight for part in parts.values()]
        active = sum(count > 0 for count in counts)
        weights = [float(count > 0) / max(1, active) for count in counts]
        closed = {r: p.closed.periods for r, p in parts.items() if p.closed}
        shared: dict[str, Any] = {**settings, "periods": common_periods(closed)}
        return (
            Reduce(
                rank=rank,
                epoch=epoch,
                window=reduction.window,
                attempt=reduction.attempt,
                weight=weight,
                active_ranks=active,
                copies=reduction.copies,
                mean_over=reduction.mean_over,
                **shared,
            )
            for rank, weight in zip(parts, weights, strict=True)
        )

    def _outer_kind(self, epoch_batches: int, window_batches: int) -> str:
        """Nesterov, unless the run is known to be too short for its momentum.

        Decided anew until El Che has settled.
        """
        if (
            self._config.windows.outer.optimizer == "auto"
            and self._windows < SETTLED_WINDOWS
        ):
            known = None if self._epochs is None else epoch_batches * self._epochs
            short = known is not None and known < FEW_WINDOWS * window_batches
            self._outer = "average" if short else "nesterov"
        return self._outer
