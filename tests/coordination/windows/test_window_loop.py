"""What a rank does next where that is not a matter of course."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence.rank_time import RankTime
from elche.coordination.protocol.instructions import (
    Adopt,
    CloseWindow,
    OpenWindow,
    Reduce,
    Regroup,
)
from elche.coordination.windows.window_loop import (
    AGAIN,
    CATCH_UP,
    CLOSED,
    HELD_WINDOWS,
    LEASE,
    LINGER_S,
    LOOK_EVERY_S,
    Do,
    WindowLoop,
)
from elche.errors import ProtocolError
from tests.harness.reached import reach


def timed(batch_s: float) -> RankTime:
    """Of a rank whose batches take so long."""
    known = RankTime(recent=1)
    known.observe(1, batch_s)
    return known


def opened(window: int = 0, **changes: Any) -> OpenWindow:
    values: dict[str, Any] = {
        "rank": 0,
        "epoch": 0,
        "window": window,
        "wall_s": 1.0,
        "max_batches": None,
        "hold_after": None,
        "adopt_at": None,
        "patience_s": 5.0,
        "committed_samples": 0,
        "planned_samples": 8,
        "planned_batches": 1,
    }
    return OpenWindow(**values | changes)


def reduction(window: int = 0) -> Reduce:
    return Reduce(
        rank=0,
        epoch=0,
        window=window,
        attempt=0,
        weight=0.0,
        active_ranks=1,
        buffers=(),
        outer="average",
        outer_lr=1.0,
        outer_momentum=0.0,
    )


def overlapped(**changes: Any) -> WindowLoop:
    loop = WindowLoop(timed(0.5), overlapped=True)
    loop.handle(opened(**changes), 0.0)
    loop.trained(0.5)
    return loop


def test_a_rank_that_went_astray_trains_no_batch_that_would_be_lost() -> None:
    """What it trained until the mean replaces its parameters would be gone."""
    loop = overlapped()
    loop.closed(1.0, is_finite=False)
    loop.handle(opened(1), 1.0)
    assert loop.next(1.0, has_work=True).do is Do.WAIT
    loop.handle(reduction(), 1.1)
    assert loop.next(1.1, has_work=True).do is Do.BEGIN
    loop.begun()
    assert loop.next(1.1, has_work=True).do is Do.FINISH
    loop.reduced(1.2)
    assert loop.next(1.2, has_work=True).do is Do.TRAIN


def test_an_older_result_is_not_the_mean_to_start_from() -> None:
    """Once: a rank that was diverged trained on after it, and lost that to the mean."""
    loop = overlapped()
    loop.closed(1.0, is_finite=False)
    loop.handle(opened(1), 1.0)
    loop.handle(Regroup(rank=0, generation=1, left=(2,), joined=()), 1.0)
    assert loop.next(1.0, has_work=True).do is Do.REGROUP
    loop.regrouped()
    assert loop.next(1.0, has_work=True).do is Do.WAIT
    loop.handle(Adopt(rank=0, epoch=0, window=-1, source=0), 1.0)
    assert loop.next(1.0, has_work=True).do is Do.ADOPT
    loop.reduced(1.0)
    assert loop.next(1.0, has_work=True).do is Do.WAIT
    loop.handle(reduction(), 1.1)
    loop.begun()
    loop.reduced(1.2)
    assert loop.next(1.2, has_work=True).do is Do.TRAIN


def test_what_is_under_way_in_a_group_that_is_left_is_not_asked_for() -> None:
    loop = in_flight()
    assert loop.in_flight == reduction()
    loop.handle(Regroup(rank=0, generation=1, left=(2,), joined=()), 1.0)
    assert loop.in_flight is None  # it may be half connected to the next one
    assert loop.next(1.0, has_work=True).do is Do.REGROUP


def in_flight() -> WindowLoop:
    """A rank that has closed its window, whose reduction is under way."""
    loop = overlapped()
    loop.closed(1.0)
    loop.handle(reduction(), 1.0)
    assert loop.next(1.0, has_work=False).do is Do.BEGIN
    loop.begun()
    return loop


def test_a_throttled_rank_waits_for_the_next_windows_limit() -> None:
    loop = overlapped(hold_after=4)
    loop.closed(1.0)
    assert loop.next(1.0, has_work=True).why == CATCH_UP


@pytest.mark.parametrize("is_open", [False, True])
def test_a_rank_without_work_for_a_moment_does_not_wait_for_a_slow_link(
    is_open: bool,
) -> None:
    """Once it did, for seconds, and the lease that was on its way lay there."""
    loop = in_flight()
    if is_open:
        loop.handle(opened(1, wall_s=20.0), 1.0)
    now_s, looks = 1.0, 0
    while (action := loop.next(now_s, has_work=False)).do is Do.WAIT:
        assert action.timeout_s is not None
        assert 0.0 < action.timeout_s <= LOOK_EVERY_S
        now_s += action.timeout_s
        looks += 1
    assert action.do is Do.FINISH
    assert LINGER_S <= now_s - 1.0 <= LINGER_S + LOOK_EVERY_S
    assert looks < 100
    assert loop.next(1.0, has_work=False, is_reduced=True).do is Do.FINISH


def test_a_lease_that_comes_meanwhile_is_trained_on() -> None:
    loop = in_flight()
    assert loop.next(1.5, has_work=False).do is Do.WAIT
    loop.handle(opened(1, wall_s=20.0), 1.6)
    assert loop.next(1.6, has_work=True).do is Do.TRAIN
    loop.trained(0.5)
    assert loop.next(9.0, has_work=False).do is Do.WAIT  # its patience begins anew


@pytest.mark.parametrize(
    ("changes", "batches", "begins"),
    [
        ({}, 1, True),
        ({}, 0, False),
        ({"wall_s": None, "max_batches": 4, "adopt_at": 0}, 1, False),
    ],
)
def test_only_a_rank_that_trained_without_a_plan_begins_at_its_end(
    changes: dict[str, Any], batches: int, begins: bool
) -> None:
    loop = WindowLoop(timed(0.5), overlapped=True)
    loop.handle(opened(**changes), 0.0)
    for _ in range(batches):
        loop.trained(0.5)
    assert loop.begins_at_close is begins


def ends_at(loop: WindowLoop, begun_s: float) -> float:
    """When a rank that trains tenths of a second from then on closes its window."""
    now_s = begun_s
    while loop.next(now_s, has_work=True, is_reduced=True).do is not Do.CLOSE:
        if loop.in_flight is not None:
            loop.reduced(now_s)
            continue
        now_s += 0.1
        loop.trained(0.1)
    return now_s


@pytest.mark.parametrize(("last_closed_s", "ends_s"), [(1.0, 2.0), (1.9, 2.9)])
def test_a_window_begins_when_the_last_rank_has_ended_the_one_before(
    last_closed_s: float, ends_s: float
) -> None:
    """Or a rank that is a little quicker comes to be a whole window ahead of others."""
    loop = WindowLoop(timed(0.1), overlapped=True)
    loop.handle(opened(), 0.0)
    assert ends_at(loop, 0.0) == pytest.approx(1.0)
    loop.closed(1.0)
    loop.handle(opened(1), 1.0)
    now_s = 1.0
    while now_s < last_closed_s + 1e-9:  # it looks when each of its batches ends
        assert loop.next(now_s, has_work=True).do is Do.TRAIN
        now_s += 0.1
        loop.trained(0.1)
    loop.handle(reduction(), now_s)
    assert loop.next(now_s, has_work=True).do is Do.BEGIN
    loop.begun()
    assert ends_at(loop, now_s) == pytest.approx(ends_s)


def blocking() -> WindowLoop:
    """A rank under ``cadence`` that has closed its window."""
    loop = WindowLoop(timed(0.5), overlapped=False)
    loop.handle(opened(), 0.0)
    loop.closed(1.0)
    return loop


def test_a_window_that_opens_without_a_reduction_is_trained_in() -> None:
    """No rank has trained in the last one."""
    loop = blocking()
    assert loop.next(1.0, has_work=True).why == CLOSED
    loop.handle(opened(1), 1.0)
    assert loop.next(1.0, has_work=True).do is Do.TRAIN


def test_a_reduction_that_failed_is_waited_for_in_an_open_window() -> None:
    loop = blocking()
    loop.handle(reduction(), 1.0)
    loop.handle(opened(1), 1.0)
    assert loop.next(1.0, has_work=True).do is Do.REDUCE
    loop.handle(Regroup(rank=0, generation=1, left=(1,), joined=()), 1.1)
    loop.regrouped()
    assert loop.next(1.1, has_work=True).why == AGAIN
    loop.handle(reduction(), 1.2)
    assert loop.next(1.2, has_work=True).do is Do.REDUCE
    loop.reduced(1.3)
    assert loop.next(1.3, has_work=True).do is Do.TRAIN


def test_what_is_out_of_turn_is_refused() -> None:
    loop = in_flight()
    with pytest.raises(ProtocolError, match="window 0 is IN_FLIGHT, got Reduce"):
        loop.handle(reduction(), 1.0)
    with pytest.raises(ProtocolError, match="begins while it is IN_FLIGHT"):
        loop.begun()
    with pytest.raises(ProtocolError, match="window 1 is closed while UNOPENED"):
        loop.closed(1.0)
    loop.handle(opened(1), 1.0)
    with pytest.raises(ProtocolError, match="expected window 1, got OpenWindow"):
        loop.handle(opened(1), 1.0)
    with pytest.raises(ProtocolError, match="while OPEN, the last result IN_FLIGHT"):
        loop.closed(1.0)
    loop.reduced(1.0)
    with pytest.raises(ProtocolError, match="window 0 is HELD, got Reduce"):
        loop.handle(reduction(), 1.0)


@pytest.mark.parametrize(("window", "obeys"), [(0, False), (1, True)])
def test_an_order_to_close_is_of_the_window_in_hand(window: int, obeys: bool) -> None:
    """One may come for a window that this rank has closed of its own accord."""
    loop = overlapped()
    loop.closed(1.0)
    loop.handle(reduction(), 1.0)
    loop.begun()
    loop.reduced(1.0)
    loop.handle(opened(1, wall_s=20.0), 1.0)
    loop.handle(CloseWindow(rank=0, epoch=0, window=window, drain=False), 1.0)
    expected = Do.CLOSE if obeys else Do.TRAIN
    assert loop.next(1.0, has_work=True).do is expected


@pytest.mark.reaches("held", "moved", "given up")
@given(
    is_overlapped=st.booleans(),
    planned=st.integers(1, 3),
    runs=st.lists(st.integers(0, 16), min_size=1, max_size=5),
)
def test_a_live_graph_holds_back_what_changes_parameters(
    is_overlapped: bool, planned: int, runs: list[int]
) -> None:
    """To the next boundary without one, and for three windows at most."""
    loop = WindowLoop(timed(0.1), overlapped=is_overlapped)
    loop.handle(opened(wall_s=0.1 * planned, planned_batches=planned), 0.0)
    now_s, held = 0.0, 0
    live = [is_live for run in runs for is_live in (False, *[True] * run)]
    for is_live in live:
        held = held if is_live else 0
        is_ahead = False  # a batch is begun, or the boundary is not over
        while not is_ahead:
            args: dict[str, bool] = {"has_work": True, "is_reduced": True}
            due = copy.deepcopy(loop).next(now_s, **args).do
            moves = due is (Do.FINISH if is_overlapped else Do.CLOSE)
            done = loop.next(now_s, **args, is_live=is_live).do
            if is_live and moves and held < HELD_WINDOWS * planned:
                reach("held")
                assert done is Do.TRAIN
                held += 1
            else:
                assert done is due
                reach("given up" if is_live and moves else "moved", moves)
            is_ahead = done is Do.TRAIN
            carry_out(loop, done, now_s, planned)
        now_s += 0.1
        loop.trained(0.1)


def carry_out(loop: WindowLoop, done: Do, now_s: float, planned: int) -> None:
    """All ranks do the same at once."""
    if done is Do.CLOSE:
        loop.closed(now_s)
        loop.handle(reduction(loop.window - 1), now_s)
        plan = opened(loop.window, wall_s=0.1 * planned, planned_batches=planned)
        loop.handle(plan, now_s)
    elif done is Do.BEGIN:
        loop.begun()
    elif done in (Do.REDUCE, Do.FINISH):
        loop.reduced(now_s)


def test_without_work_a_live_graph_waits_a_moment_for_a_lease() -> None:
    loop = WindowLoop(timed(0.1), overlapped=False)
    loop.handle(opened(), 0.0)
    loop.trained(0.1)
    looked = loop.next(2.0, has_work=False, is_live=True)
    assert (looked.do, looked.why) == (Do.WAIT, LEASE)
    assert loop.next(2.1, has_work=True, is_live=True).do is Do.TRAIN
    loop.trained(0.1)
    assert loop.next(3.0, has_work=False, is_live=True).do is Do.WAIT
    assert loop.next(3.0 + LINGER_S, has_work=False, is_live=True).do is Do.CLOSE
