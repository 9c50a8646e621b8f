"""Work for ranks: open windows, leases, notifications to idle ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from elche.coordination.policy import Steps
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
"""Most batches of a rank in the window in which speeds are measured."""


def open_windows(state: WindowState, ranks: Sequence[int]) -> Iterator[Instruction]:
    """Opens for each of these ranks the window that it comes to."""
    if ranks and not state.life.is_draining:
        yield from grant_planned(state)
    for rank in ranks:
        yield _open(state, rank)


def next_window(state: WindowState, now_s: float) -> Steps:
    """Opens the window for all who have none, with leases for who waits for some."""
    state.leasing.set_costs(state.pacing.batch_s())
    yield from open_windows(state, state.book.unopened())
    yield from permits(state)
    yield from lease(state, sorted(state.leasing.hungry), now_s)
    yield from close_idle(state, state.members)


def permits(state: WindowState) -> Iterator[Instruction]:
    """New limits of each rank, after the slowest has progressed."""
    if state.throttle.limit is None:
        return
    for rank in state.members:
        part = state.book.part(rank)
        batches = _permit(state, rank)
        if part.is_open and batches is not None:
            part.permit(batches)
            yield Permit(
                rank=rank,
                epoch=state.epoch,
                window=state.book.window_of(rank),
                batches=batches,
            )


def lease(
    state: WindowState, ranks: Sequence[int], now_s: float
) -> Iterator[Instruction]:
    """Tops up these ranks; sends CloseWindow to those that get nothing more."""
    if state.life.is_draining or state.plans is not None:
        if not state.life.is_draining:
            yield from grant_planned(state)
        yield from close_idle(state, ranks)
        return
    had = state.ledger.pooled
    for rank in ranks:
        yield from state.leasing.top_up(rank, now_s)
    yield from state.leasing.feed_first(now_s)
    ran_out = had and not state.ledger.pooled
    yield from close_idle(state, state.members if ran_out else ranks)


def grant_planned(state: WindowState) -> list[Instruction]:
    """Leases what a plan says, two windows ahead and past every loader's horizon."""
    granted: list[Instruction] = []
    if state.plans is None:
        return granted
    ranks = sorted(state.members)
    horizon = max(member.horizon_batches for member in state.members.values())
    while True:
        ahead = state.plans.unleased - state.book.window
        held = min(state.ledger.leased(rank) for rank in ranks)
        if ahead > 2 and (held > horizon or ahead > 2 + horizon):
            break
        plan = state.plans.lease_next()
        if plan is None:
            break
        for rank, (start, stop) in zip(ranks, plan.parts, strict=True):
            if start < stop:
                state.ledger.lease_range(rank, start, stop)
                granted.append(
                    GrantBatches(rank=rank, epoch=state.epoch, start=start, stop=stop)
                )
    return granted


def _is_owed(state: WindowState, rank: int) -> bool:
    """True if a plan has more for a rank in the window that it is in."""
    plan = state.planned(state.book.window_of(rank))
    done = state.book.part(rank).batches
    return plan is not None and done < plan.batches(state.place(rank))


def close_idle(state: WindowState, ranks: Iterable[int]) -> Iterator[Instruction]:
    """Tells ranks that will get no more work in their window to close it."""
    closes = False
    for told in _tell_idle(state, ranks):
        closes = True
        yield told
    if closes and state.throttle.is_final:  # those it held have nobody to wait for
        yield from _tell_idle(state, state.members)


def _tell_idle(state: WindowState, ranks: Iterable[int]) -> Iterator[Instruction]:
    others_wait = state.book.any_closed
    nothing_left = state.ledger.pooled == 0
    for rank in ranks:
        if state.book.part(rank).phase is not PartPhase.OPEN:
            continue
        starved = nothing_left or (others_wait and rank in state.leasing.hungry)
        is_idle = starved and not state.ledger.leased(rank)
        is_idle = is_idle and not _is_owed(state, rank)
        is_held = state.throttle.holds(state.book.batches_since(rank))
        if state.life.is_draining or is_idle or is_held:
            state.throttle.stop(rank)
            yield _close_window(state, rank)


def _close_window(state: WindowState, rank: int) -> CloseWindow:
    state.book.part(rank).tell_to_close()
    return CloseWindow(
        rank=rank,
        epoch=state.epoch,
        window=state.book.window_of(rank),
        drain=state.life.is_draining,
    )


def calibrate(state: WindowState, rank: int) -> Steps:
    """A rank's speed is known, or will not be: when that is true of all, go by it.

    The first window of a run has no length. It ends when every rank has been measured,
    so that no rank waits for the slowest one to run a whole anchor of batches.
    """
    if not state.calibrated(rank):
        return
    state.note(state.pacing.measure(state.book.parts, None, is_tail=True))
    state.leasing.set_costs(state.pacing.batch_s())
    for other in state.members:
        if state.book.part(other).phase is PartPhase.OPEN:
            yield _close_window(state, other)


def _open(state: WindowState, rank: int) -> OpenWindow:
    window = state.book.window_of(rank)
    pace = state.pace(window)
    planned_samples = state.samples_of(pace)
    committed = state.plan_samples(window, planned_samples)
    plan = state.planned(window)
    is_diverged = plan is None and rank in state.diverged
    if plan is None:
        batches = most = pace.batches[rank]
        if state.is_calibrating:
            most = max(batches, CALIBRATION_BATCHES)
        ends_by_time = pace.wall_s is not None and not is_diverged
        opened = OpenWindow(
            rank=rank,
            epoch=state.epoch,
            window=window,
            wall_s=pace.wall_s,
            max_batches=None if ends_by_time else 1 if is_diverged else most,
            hold_after=_permit(state, rank),
            adopt_at=None,
            patience_s=pace.patience_s,
            committed_samples=committed,
            planned_samples=planned_samples,
            planned_batches=batches,
        )
    else:
        at = state.place(rank)
        opened = OpenWindow(
            rank=rank,
            epoch=state.epoch,
            window=window,
            wall_s=None,
            max_batches=plan.batches(at),
            hold_after=None,
            adopt_at=min(1, plan.batches(at)),
            patience_s=None,
            committed_samples=plan.committed_samples,
            planned_samples=plan.planned_samples,
            planned_batches=plan.batches(at),
        )
    state.book.part(rank).open(
        opened, is_diverged=is_diverged, is_drained=state.life.is_draining
    )
    return opened


def _permit(state: WindowState, rank: int) -> int | None:
    """Batches that a rank may run in the window it is in; None without a limit."""
    limit = state.throttle.limit
    if limit is None:
        return None
    before = state.book.batches_since(rank) - state.book.part(rank).batches
    return max(0, limit - before)
