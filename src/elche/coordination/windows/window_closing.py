"""Evaluation of closed windows: discards, reduces and repeats updates. Pure.

An update that is not finite (NaN or Inf) has no weight. Its batches are *discarded*:
they count as done and are not trained on again. Its rank returns to the common
parameters and is *diverged* until it sends a finite update. Meanwhile its windows have
one batch, except under a plan. A second such update in a row ends the run with an error
that names the rank, unless `WindowConfig.non_finite` is "leave_out". If the common
parameters are not finite, no update can be excluded, and the run always ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elche.coordination.accounts.batch_ranges import joined, named
from elche.coordination.protocol.events import ModelUpdated, WindowClosed
from elche.coordination.protocol.instructions import Adopt, Instruction
from elche.coordination.windows.reductions import Reduction, ReductionPlanner
from elche.coordination.windows.window_state import WindowState
from elche.errors import NonFiniteError


def judge_update(state: WindowState, closed: WindowClosed) -> None:
    """Evaluates a closed window: discards an update that is not finite.

    A rank without an update stays diverged: its gradients wait for a step, and are not
    known to be finite.

    Raises:
        NonFiniteError: the update is the second in a row, under ``non_finite="stop"``.
    """
    rank, window = closed.rank, closed.window
    part, was_diverged = state.book.parts[rank], rank in state.diverged
    if closed.is_finite and closed.has_moved and part.trained:
        state.diverged.pop(rank, None)
    if closed.is_finite:
        if rank in state.diverged:
            state.diverged[rank] += part.trained
        return
    state.ledger.discard(rank)
    state.totals.discard(window, rank, part.samples)
    part.samples, part.is_diverged = 0, True
    state.note(
        f"rank {rank}: its update of window {window} (batches {named(part.trained)}) "
        "is not finite: it is discarded"
    )
    batches = state.diverged.setdefault(rank, [])
    batches += part.trained
    if was_diverged and state.config.windows.non_finite == "stop":
        raise NonFiniteError(
            f"the update of rank {rank} was not finite twice in a row, in epoch "
            f"{state.epoch} (batches {named(batches)}): look at these samples, the "
            "loss and the learning rate, or at the rank's device; "
            "windows=elche.WindowConfig(non_finite='leave_out') continues without "
            "such updates",
            rank,
            joined(batches),
        )


def refuse_lost(state: WindowState, running: Reduction, event: ModelUpdated) -> None:
    """Ends a run whose common parameters contain NaN or Inf, as all updates would.

    Raises:
        NonFiniteError: this rank's parameters are not finite.
    """
    if math.isfinite(event.parameter_norm):
        return
    reduced = {r: part.trained for r, part in running.parts.items() if part.samples}
    batches = [each for trained in reduced.values() for each in trained]
    raise NonFiniteError(
        f"rank {event.rank} holds non-finite parameters after window {event.window} "
        f"of epoch {state.epoch}, although the updates of ranks {sorted(reduced)} "
        f"were finite (batches {named(batches)}); no later update can be finite: look "
        "at the learning rate, outer_lr and the loss",
        event.rank,
        joined(batches),
    )


def begin_reduction(
    state: WindowState, planner: ReductionPlanner, now_s: float
) -> Sequence[Instruction]:
    """Plans the reduction from the ranks' actual work."""
    parts = state.book.parts
    counts = zip(state.pacing.ranks, state.pacing.el_che.batch_counts, strict=True)
    batches = sum(count for rank, count in counts if rank not in state.idle)
    copies = {r: part.closed.copies for r, part in parts.items() if part.closed}
    plan = planner.plan(
        parts,
        state.ledger.sizes.num_batches,
        batches,
        epoch=state.epoch,
        window=state.book.window,
        copies=state.copies.closed(copies, state.idle, is_last=state.life.is_final),
        mean_over=state.mean_over,
    )
    begun_s = now_s if state.is_overlapped else None
    return state.begin(Reduction(plan, dict(parts), begun_s)).instructions()


def resume_reduction(
    state: WindowState, reduced: Mapping[int, int]
) -> Sequence[Instruction]:
    """Continues or repeats a reduction after all members have formed the new group.

    If any member holds the result of the window being reduced, all adopt it, including
    the lost ranks' part. If none does, it is repeated without the lost ranks.
    """
    state.is_paused = False
    running = state.running
    if running is None:
        return []
    running.again(state.members)
    window = running.plan.window
    if holders := [r for r, last in reduced.items() if last >= window]:
        source, epoch = min(holders), state.epoch
        return [
            Adopt(rank=rank, epoch=epoch, window=window, source=source)
            for rank in state.members
        ]
    state.unstage_gone(running)
    return running.instructions()
