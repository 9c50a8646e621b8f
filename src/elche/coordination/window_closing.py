"""What is made of a window that all ranks have closed: rejected, reduced, recorded.

A contribution that is not finite goes back to the pool, with every batch of it. The one
that is at fault is found at the second try; it ends the run, or is left out, as
`RunConfig.non_finite` says, and is named. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elche.coordination.batch_ranges import Range
from elche.coordination.epoch_plan import WindowPlan
from elche.coordination.instructions import Instruction
from elche.coordination.reductions import ReductionPlanner
from elche.coordination.suspects import joined
from elche.coordination.window_book import Reduction
from elche.coordination.window_state import WindowState
from elche.errors import ConfigError, NonFiniteError, ProtocolError

REPEATS = 3
"""Windows in a row that bring nothing finite, after which it is the rank's fault."""


def reject_unusable(state: WindowState) -> None:
    """Batches whose contribution is not finite go back to the pool.

    Which one is at fault is not known the first time: all that were in such a part are
    suspect, and watched when they are trained on again. A rank that watches takes back
    what a batch has done and names it; the rest of its window counts. One that fails
    twice is left out, or ends the run; the others are tried until they count.

    Raises:
        NonFiniteError: it happened again, and the run is to stop then.
    """
    spoilt: list[int] = []
    for rank, part in state.book.parts.items():
        closed = part.closed
        assert closed is not None
        batches = _batches(
            state.ledger.reject(rank, closed.rejected if closed.is_finite else None)
        )
        if batches:
            sizes = state.ledger.sizes
            samples = sum(sizes.samples_in(batch, batch + 1) for batch in batches)
            state.totals.discard(state.book.window, rank, samples)
            part.samples -= samples
        if part.samples:
            state.unusable[rank] = 0
        elif batches or not closed.is_finite:
            state.unusable[rank] = state.unusable.get(rank, 0) + 1
        if batches:
            spoilt += _failed(state, rank, batches, closed.culprits)
        spoilt += _lost(state, rank, closed.lost)
    if spoilt and state.source is not None:
        state.source.try_again(
            state.book.window - state.first_window + (2 if state.is_overlapped else 1),
            sorted(spoilt),
        )


def _failed(
    state: WindowState, rank: int, batches: Sequence[int], culprits: Sequence[int]
) -> list[int]:
    """Counts who failed; returns what is to be trained on again.

    Raises:
        NonFiniteError: the run is to stop here.
    """
    stray = sorted(set(culprits).difference(batches))
    if stray:
        raise ProtocolError(
            f"rank {rank} blames batch {stray[0]}, which it had not in window "
            f"{state.book.window}, or has not taken back"
        )
    failed = sorted(culprits)
    if not failed:  # the suspects were innocent if there was anybody else
        failed = [b for b in batches if b not in state.rejected] or list(batches)
    again = [batch for batch in failed if batch in state.rejected]
    state.note(
        f"rank {rank}: batches {_named(failed)} gave no number; "
        f"{len(batches) - len(again)} batches of its window are trained on again"
    )
    if state.config.non_finite == "stop" and not state.is_draining:
        if again:
            raise _not_finite(state, rank, again, "for the second time")
        if state.unusable.get(rank, 0) >= REPEATS:
            raise _not_finite(state, rank, failed, f"in {REPEATS} windows in a row")
    for batch in failed:
        state.rejected[batch] = state.rejected.get(batch, 0) + 1
    gone = batches if state.is_draining else again
    for batch in gone:
        state.ledger.leave_out(batch, batch + 1)
        state.left_out.append((batch, batch + 1))
    return [batch for batch in batches if batch not in gone]


def _lost(state: WindowState, rank: int, parts: Sequence[Range]) -> list[int]:
    """Batches of earlier windows are in no step: they count no more.

    Their gradients waited, and the step that they came to was taken back.

    Returns:
        What is to be trained on again.
    """
    batches = _batches(parts)
    if not batches:
        return []
    samples = state.ledger.revoke(rank, parts)
    state.progress_samples -= samples
    state.totals.discard(state.book.window, rank, samples)
    state.note(
        f"rank {rank}: batches {_named(batches)} of earlier windows waited for a step "
        "that was taken back, and count no more"
    )
    if not state.is_draining:
        return batches
    for batch in batches:
        state.ledger.leave_out(batch, batch + 1)
        state.left_out.append((batch, batch + 1))
    return []


def _batches(parts: Sequence[Range]) -> list[int]:
    return [batch for start, stop in parts for batch in range(start, stop)]


def _not_finite(
    state: WindowState, rank: int, batches: Sequence[int], when: str
) -> NonFiniteError:
    return NonFiniteError(
        f"what rank {rank} learned in epoch {state.epoch} was not finite {when}; "
        f"one of its batches ({_named(batches)}) or the rank itself is at fault: look "
        "at the data, the loss and the learning rate, or go on without such batches by "
        "non_finite='leave_out'",
        rank,
        joined(batches),
    )


def _named(batches: Iterable[int]) -> str:
    return ", ".join(
        str(start) if stop == start + 1 else f"{start} to {stop - 1}"
        for start, stop in joined(batches)
    )


def end_plan(state: WindowState) -> None:
    """Nobody trained in this window: what is left of the epoch where a plan ends.

    Batches that gave no number here, and did in the recorded run, have no second try.

    Raises:
        ConfigError: the recorded loop broke off here, and this one does not.
        NonFiniteError: there are such batches, and the run is to stop then.
    """
    if state.source is None or state.is_draining:
        return
    if state.source.window(state.book.window - state.first_window) is not None:
        return
    untried = _batches(state.ledger.pooled_ranges())
    if untried and not state.rejected:
        raise ConfigError(
            f"the recorded run left epoch {state.epoch} before its end, this run's "
            "loop goes on; leave it at the same batch"
        )
    if untried and state.config.non_finite == "stop":
        raise NonFiniteError(
            f"what ranks learned from batches {_named(untried)} of epoch "
            f"{state.epoch} was not finite, as it was in the recorded run: look at "
            "the data, the loss and the learning rate, or go on without such batches "
            "by non_finite='leave_out'",
            batches=joined(untried),
        )
    for batch in untried:
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
        settings = planner.settings(
            state.reduced_parts,
            state.ledger.sizes.num_batches,
            state.pacing.el_che.total_batches,
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
