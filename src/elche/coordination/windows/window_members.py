"""Windows across changes of membership: leases kept, work redone. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elche.coordination.policy import Member
from elche.coordination.protocol.instructions import Adopt, Instruction
from elche.coordination.windows.reductions import ReductionPlanner
from elche.coordination.windows.window_state import WindowState
from elche.errors import TransitionError


def remove_member(state: WindowState, rank: int) -> None:
    """A rank is gone: its leases and what it had not committed are pooled again."""
    state.is_paused = True
    del state.members[rank]
    state.left.discard(rank)
    _give_work_to_all(state)
    state.reductions.remove(rank)
    state.ledger.remove(rank)
    _discard(state, rank)
    state.leasing.remove(rank)
    state.book.remove(rank)
    state.throttle.remove(rank)
    state.pacing.change(sorted(state.members))
    state.last_pace = -1, None  # it was of other ranks
    state.uncalibrated.discard(rank)
    state.diverged.pop(rank, None)
    if state.is_draining:
        state.ledger.abandon()


def add_member(state: WindowState, member: Member) -> None:
    """A rank joins; it takes part once it holds the common model."""
    state.is_paused = True
    _give_work_to_all(state)
    state.members[member.rank] = member
    state.reductions.add(member.rank)
    state.ledger.add(member.rank)
    state.leasing.add(member.rank, member.horizon_batches)
    state.book.add(member.rank)
    state.pacing.change(sorted(state.members))
    state.last_pace = -1, None  # it was of other ranks


def _discard(state: WindowState, rank: int) -> None:
    """What a lost rank trained on since the last reduction was begun is in no model."""
    book = state.book
    state.totals.discard(book.window, rank, book.parts[rank].samples)
    state.totals.discard(book.window + 1, rank, book.ahead[rank].samples)


def _give_work_to_all(state: WindowState) -> None:
    """Who was not worth any work may be all that is left."""
    idle, state.idle = state.idle, frozenset()
    for rank in sorted(idle.intersection(state.members)):
        state.leasing.add(rank, state.members[rank].horizon_batches)


def settle(
    state: WindowState, planner: ReductionPlanner, reduced: Mapping[int, int]
) -> list[Instruction]:
    """All members are in the new group: a reduction under way is taken over or redone.

    If one of them holds the result of the window that was being reduced, all adopt it,
    with the part of those who are gone. If none does, it is redone without them.

    Args:
        state: of the epoch.
        planner: plans the reduction again.
        reduced: the last window whose result each member holds.

    Returns:
        What the members are told.
    """
    state.is_paused = False
    reductions = state.reductions
    running = reductions.resume(state.book.window - 1, state.members)
    if running is None:
        return []
    holders = [rank for rank, window in reduced.items() if window >= running.window]
    if running.is_handover:
        holders += [rank for rank in state.members if rank not in reductions.joining]
    if holders:
        return [
            Adopt(
                rank=rank, epoch=state.epoch, window=running.window, source=min(holders)
            )
            for rank in state.members
        ]
    if running.is_handover:
        raise TransitionError("no remaining rank holds the model")
    for rank, samples in state.ledger.unstage_gone().items():
        state.progress_samples -= samples
        state.totals.discard(running.window, rank, samples)
    reductions.leave_out_gone(state.members)
    return [*planner.plan(reductions.parts, reductions.settings, state.epoch, running)]
