"""What is made of a window that all ranks have closed: rejected, reduced, recorded.

A contribution that is not finite goes back to the pool; a batch whose contribution was
that twice is left out, and named. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from elche.coordination.epoch_plan import WindowPlan
from elche.coordination.ledger import Range
from elche.coordination.messages import Instruction
from elche.coordination.reductions import ReductionPlanner
from elche.coordination.window_book import Reduction
from elche.coordination.window_state import WindowState


def reject_unusable(state: WindowState) -> None:
    """Contributions that are not finite go back; twice, they are left out."""
    for rank, part in state.book.parts.items():
        assert part.closed is not None
        if part.closed.is_finite:
            continue
        part.samples = 0
        for start, stop in state.ledger.reject(rank):
            state.note(f"rank {rank}: batches {start}..{stop - 1} gave no number")
            for batch in range(start, stop):
                seen = state.rejected.get((batch, batch + 1), 0) + 1
                state.rejected[batch, batch + 1] = seen
                if seen > 1 or state.is_draining:
                    state.ledger.leave_out(batch, batch + 1)
                    state.left_out.append((batch, batch + 1))


def leave_out_untried(state: WindowState) -> None:
    """A plan is over: what it does not try a second time is left out."""
    for start, stop in state.ledger.pooled_ranges():
        for batch in range(start, stop):
            if (batch, batch + 1) in state.rejected:
                state.ledger.leave_out(batch, batch + 1)
                state.left_out.append((batch, batch + 1))


def begin_reduction(
    state: WindowState,
    planner: ReductionPlanner,
    trained: Mapping[int, tuple[Range, ...]],
) -> list[Instruction]:
    """Plans the reduction with what the ranks really did, or as was recorded.

    ``trained`` is what each rank closed the window with, also where it was rejected:
    a replay does, and rejects, the same.
    """
    state.reduction = Reduction(state.book.window, state.members)
    state.reduced_parts = dict(state.book.parts)
    planned = state.planned(state.book.window)
    if planned is not None and planned.reduction is not None:
        settings = dict(planned.reduction)
        settings["buffers"] = tuple(settings["buffers"])
    else:
        is_last = not state.has_work and state.book.is_untouched
        settings = planner.settings(
            state.reduced_parts,
            state.ledger.sizes.num_batches,
            state.pacing.el_che.total_batches,
            None if is_last else state.book.window - state.first_window,
        )
    state.reduction_settings = settings
    _record(state, settings, trained)
    return [*planner.plan(state.reduced_parts, settings, state.epoch, state.reduction)]


def _record(
    state: WindowState,
    settings: dict[str, object],
    trained: Mapping[int, tuple[Range, ...]],
) -> None:
    """Writes down what the window did, for a replay."""
    ranks = sorted(state.members)
    opened = [state.book.parts[rank].opened for rank in ranks]
    last = state.last_reduction
    reports = {} if last is None else last.reports
    first = next(plan for plan in opened if plan is not None)
    state.record.windows.append(
        WindowPlan(
            parts=[list(trained[rank]) for rank in ranks],
            adopt_at=[
                reports[rank].adopted_at if rank in reports else 0 for rank in ranks
            ],
            committed_samples=first.committed_samples,
            planned_samples=first.planned_samples,
            planned_batches=[plan.planned_batches if plan else 0 for plan in opened],
            reduction=settings,
        )
    )
