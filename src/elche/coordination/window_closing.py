"""What is made of a window that all ranks have closed: rejected, reduced, recorded.

A contribution that is not finite goes back to the pool. A batch whose contribution was
that twice ends the run, or is left out, as `RunConfig.non_finite` says; it is named.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elche.coordination.epoch_plan import WindowPlan
from elche.coordination.ledger import Range
from elche.coordination.messages import Instruction
from elche.coordination.reductions import ReductionPlanner
from elche.coordination.window_book import Reduction
from elche.coordination.window_state import WindowState
from elche.errors import ConfigError, NonFiniteError

REPEATS = 3
"""Windows in a row that bring nothing finite, after which it is the rank's fault."""


def reject_unusable(state: WindowState) -> None:
    """Contributions that are not finite go back; twice, they are left out.

    Raises:
        NonFiniteError: it happened again, and the run is to stop then.
    """
    for rank, part in state.book.parts.items():
        assert part.closed is not None
        if part.closed.is_finite:
            if part.samples:
                state.unusable[rank] = 0
            continue
        state.totals.discard(state.book.window, rank, part.samples)
        part.samples = 0
        _stop_if_asked(state, rank)
        for start, stop in state.ledger.reject(rank):
            state.note(f"rank {rank}: batches {start}..{stop - 1} gave no number")
            for batch in range(start, stop):
                seen = state.rejected.get((batch, batch + 1), 0) + 1
                state.rejected[batch, batch + 1] = seen
                if seen > 1 or state.is_draining:
                    state.ledger.leave_out(batch, batch + 1)
                    state.left_out.append((batch, batch + 1))


def _stop_if_asked(state: WindowState, rank: int) -> None:
    """Ends the run where a batch, or a rank, has brought nothing finite again."""
    parts = state.ledger.parts(rank)
    if not parts:
        return
    state.unusable[rank] = state.unusable.get(rank, 0) + 1
    again = [
        (batch, batch + 1)
        for start, stop in parts
        for batch in range(start, stop)
        if (batch, batch + 1) in state.rejected
    ]
    if state.config.non_finite != "stop" or state.is_draining:
        return
    if again:
        raise _not_finite(state, rank, again, "for the second time")
    if state.unusable[rank] >= REPEATS:
        raise _not_finite(state, rank, parts, f"in {REPEATS} windows in a row")


def _not_finite(
    state: WindowState, rank: int, batches: Sequence[Range], when: str
) -> NonFiniteError:
    joined = _joined(batches)
    return NonFiniteError(
        f"what rank {rank} learned in epoch {state.epoch} was not finite {when}; "
        f"one of its batches ({_named(joined)}) or the rank itself is at fault: look "
        "at the data, the loss and the learning rate, or go on without such batches by "
        "non_finite='leave_out'",
        rank,
        joined,
    )


def _joined(batches: Sequence[Range]) -> list[Range]:
    """The same, with those that touch made one."""
    joined: list[Range] = []
    for start, stop in batches:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _named(batches: Sequence[Range]) -> str:
    return ", ".join(
        str(start) if stop == start + 1 else f"{start} to {stop - 1}"
        for start, stop in batches
    )


def end_plan(state: WindowState) -> None:
    """Nobody trained in this window: what is left of the epoch where a plan ends.

    Raises:
        ConfigError: the recorded loop broke off here, and this one does not.
    """
    if state.source is None or state.is_draining:
        return
    if state.source.window(state.book.window - state.first_window) is not None:
        return
    _leave_out_untried(state)
    if state.ledger.pooled:
        raise ConfigError(
            f"the recorded run left epoch {state.epoch} before its end, this run's "
            "loop goes on; leave it at the same batch"
        )


def _leave_out_untried(state: WindowState) -> None:
    """A plan is over: what it does not try a second time is left out.

    Raises:
        NonFiniteError: the run is to stop then.
    """
    untried = [
        (batch, batch + 1)
        for start, stop in state.ledger.pooled_ranges()
        for batch in range(start, stop)
        if (batch, batch + 1) in state.rejected
    ]
    if untried and state.config.non_finite == "stop":
        raise NonFiniteError(
            f"what ranks learned from batches {_named(_joined(untried))} of "
            f"epoch {state.epoch} was not finite, and a fixed plan tries nothing a "
            "second time: look at the data, the loss and the learning rate, or go on "
            "without such batches by non_finite='leave_out'",
            batches=_joined(untried),
        )
    for start, stop in untried:
        state.ledger.leave_out(start, stop)
        state.left_out.append((start, stop))


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
