"""Work for ranks: windows, leases, and closing of idle ranks' windows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elche.coordination.protocol.instructions import (
    CloseWindow,
    GrantBatches,
    Instruction,
    OpenWindow,
    Permit,
)
from elche.coordination.windows.window_book import PartPhase
from elche.coordination.windows.window_state import WindowState

CALIBRATION_BATCHES = 32
"""Most batches of a rank in the window that measures speeds."""


def open_windows(state: WindowState, ranks: Sequence[int]) -> list[Instruction]:
    """Opens the next window for each of these ranks."""
    replies = grant_planned(state) if ranks else []
    return [*replies, *(_open(state, rank) for rank in ranks)]


def next_window(state: WindowState, now_s: float) -> list[Instruction]:
    """Opens the window for ranks without one, and leases batches to hungry ranks."""
    state.leasing.set_costs(state.pacing.batch_s())
    replies = open_windows(state, state.book.unopened())
    replies += permits(state)
    replies += lease(state, sorted(state.leasing.hungry), now_s)
    return replies + close_idle(state, state.members)


def permits(state: WindowState) -> list[Instruction]:
    """Returns each rank's new limit after the slowest rank has progressed."""
    replies: list[Instruction] = []
    for rank in state.members:
        part, batches = state.book.part(rank), _permit(state, rank)
        if part.is_open and batches is not None:
            part.permitted = max(batches, part.permitted or 0)
            window = state.book.window_of(rank)
            replies.append(
                Permit(rank=rank, epoch=state.epoch, window=window, batches=batches)
            )
    return replies


def lease(state: WindowState, ranks: Sequence[int], now_s: float) -> list[Instruction]:
    """Tops up these ranks; sends CloseWindow to ranks that get no more work."""
    if state.life.is_draining or state.plans is not None:
        return grant_planned(state) + close_idle(state, ranks)
    had = state.ledger.pooled
    replies: list[Instruction] = []
    for rank in ranks:
        replies += state.leasing.top_up(rank, now_s)
    replies += state.leasing.feed_first(now_s)
    ran_out = had and not state.ledger.pooled
    return replies + close_idle(state, state.members if ran_out else ranks)


def grant_planned(state: WindowState) -> list[Instruction]:
    """Leases planned batches, two windows ahead and beyond every loader's horizon."""
    granted: list[Instruction] = []
    if state.plans is None or state.life.is_draining:
        return granted
    horizon = max(member.horizon_batches for member in state.members.values())
    while True:
        ahead = state.plans.unleased - state.book.window
        held = min(map(state.ledger.leased, state.members))
        if ahead > 2 and (held > horizon or ahead > 2 + horizon):
            break
        plan = state.plans.lease_next()
        if plan is None:
            break
        for rank, (start, stop) in plan.parts.items():
            if start < stop:
                state.ledger.lease_range(rank, start, stop)
                granted.append(
                    GrantBatches(rank=rank, epoch=state.epoch, start=start, stop=stop)
                )
    return granted


def close_idle(state: WindowState, ranks: Iterable[int]) -> list[Instruction]:
    """Closes the windows of ranks without further work in them."""
    replies = _close_starved(state, ranks)
    if replies and state.throttle.is_final:  # ranks held by it would wait in vain
        replies += _close_starved(state, state.members)
    return replies


def _close_starved(state: WindowState, ranks: Iterable[int]) -> list[Instruction]:
    replies: list[Instruction] = []
    others_wait, nothing_left = state.book.any_closed, state.ledger.pooled == 0
    for rank in ranks:
        part = state.book.part(rank)
        if part.phase is not PartPhase.OPEN:
            continue
        starved = nothing_left or (others_wait and rank in state.leasing.hungry)
        is_idle = starved and not state.ledger.leased(rank)
        plan = state.planned(state.book.window_of(rank))
        if plan is not None and part.batches < plan.batches(rank):
            is_idle = False  # the plan has more work for this rank
        is_held = state.throttle.holds(state.book.batches_since(rank))
        if state.life.is_draining or is_idle or is_held:
            state.throttle.stop(rank)
            replies.append(_close_window(state, rank))
    return replies


def _close_window(state: WindowState, rank: int) -> CloseWindow:
    state.book.part(rank).move(PartPhase.CLOSING)
    return CloseWindow(
        rank=rank,
        epoch=state.epoch,
        window=state.book.window_of(rank),
        drain=state.life.is_draining,
    )


def calibrate(state: WindowState, rank: int) -> list[Instruction]:
    """Ends a rank's calibration; after the last one, closes the calibration window.

    A run's first window has no length. It ends when every rank has been measured, so
    that no rank waits for the slowest rank to run a whole anchor of batches.
    """
    was_awaited = rank in state.uncalibrated
    state.uncalibrated.discard(rank)
    if state.uncalibrated or not was_awaited:
        return []
    state.note(state.pacing.measure(state.book.parts, None, is_tail=True))
    state.leasing.set_costs(state.pacing.batch_s())
    others = (r for r in state.members if state.book.part(r).phase is PartPhase.OPEN)
    return [_close_window(state, other) for other in others]


def _open(state: WindowState, rank: int) -> OpenWindow:
    window, part = state.book.window_of(rank), state.book.part(rank)
    plan, pace = state.planned(window), state.pace(window)
    committed, planned = state.samples_of(window, pace)
    batches = pace.batches[rank]
    most = max(batches, CALIBRATION_BATCHES) if state.uncalibrated else batches
    if plan is None and rank in state.diverged:
        most, part.is_diverged = 1, True
    ends_by_time = pace.wall_s is not None and not part.is_diverged
    opened = OpenWindow(
        rank=rank,
        epoch=state.epoch,
        window=window,
        wall_s=pace.wall_s,
        max_batches=None if ends_by_time else most,
        hold_after=_permit(state, rank) if plan is None else None,
        adopt_at=None if plan is None else min(1, batches),
        patience_s=pace.patience_s,
        committed_samples=committed,
        planned_samples=planned,
        planned_batches=batches,
    )
    part.move(PartPhase.OPEN)
    part.permitted, part.is_drained = opened.hold_after, state.life.is_draining
    return opened


def _permit(state: WindowState, rank: int) -> int | None:
    """Returns a rank's most batches in its current window; None without a limit."""
    limit = state.throttle.limit
    if limit is None:
        return None
    before = state.book.batches_since(rank) - state.book.part(rank).batches
    return max(0, limit - before)
