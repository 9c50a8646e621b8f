"""How reductions are planned, and phases of windows, out of order refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.config import RunConfig
from elche.coordination.policy import Member
from elche.coordination.protocol.events import WindowClosed
from elche.coordination.protocol.instructions import Reduce
from elche.coordination.windows.reductions import (
    FEW_WINDOWS,
    SETTLED_WINDOWS,
    Reduction,
    ReductionPlanner,
)
from elche.coordination.windows.window_book import Part, PartPhase, Throttle, WindowBook
from elche.coordination.windows.window_state import EpochLife, WindowState
from elche.errors import ProtocolError, TransitionError
from tests.coordination.test_core import reduced
from tests.coordination.windows.test_window_loop import reduction
from tests.harness.reached import reach
from tests.harness.settings import nested


def parts_of(samples: tuple[int, ...]) -> dict[int, Part]:
    """What ranks did in a window that all of them have closed."""
    return {
        rank: Part(
            samples=count,
            closed=WindowClosed(rank=rank, epoch=0, window=0, changed_buffers=()),
        )
        for rank, count in enumerate(samples)
    }


def plan_of(
    samples: tuple[int, ...],
    epochs: int | None = None,
    batches: tuple[int, int] = (1000, 10),
    planner: ReductionPlanner | None = None,
    **options: Any,
) -> Reduce:
    config = RunConfig(policy="cadence", **nested(options))
    planner = planner or ReductionPlanner(config, epochs)
    return planner.plan(parts_of(samples), *batches, epoch=0, window=0)


@pytest.mark.reaches("drifts weighed", "some that weigh nothing", "none that weighs")
@given(
    said=st.lists(
        st.tuples(st.integers(0, 100), st.one_of(st.just(0.0), st.floats(1e-9, 1e15))),
        min_size=1,
        max_size=8,
    )
)
def test_drifts_of_ranks_that_count_weigh_the_same(
    said: list[tuple[int, float]],
) -> None:
    """What was rejected, or says 0, weighs nothing and is not active."""
    parts = parts_of(tuple(samples for samples, _ in said))
    for part, (_, weight) in zip(parts.values(), said, strict=True):
        assert part.closed is not None
        part.closed = dataclasses.replace(part.closed, weight=weight)
    counts = [weight if samples else 0.0 for samples, weight in said]
    planner = ReductionPlanner(RunConfig(policy="cadence"), None)
    plan = planner.plan(parts, 1000, 10, epoch=0, window=0)
    plans = Reduction(plan, parts).instructions()
    assert [plan.weight > 0.0 for plan in plans] == [count > 0.0 for count in counts]
    assert {plan.active_ranks for plan in plans} == {sum(c > 0.0 for c in counts)}
    assert (plan.outer == "average") == (not any(counts))
    reach("none that weighs", not any(counts))
    if not any(counts):
        return
    reach("drifts weighed")
    reach("some that weigh nothing", not all(counts))
    assert sum(plan.weight for plan in plans) == pytest.approx(1.0)
    active = sum(count > 0.0 for count in counts)
    expected = [float(count > 0.0) / active for count in counts]
    assert [plan.weight for plan in plans] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_window_cannot_weigh_what_is_no_weight(weight: float) -> None:
    closed = WindowClosed(rank=1, epoch=0, window=0, changed_buffers=(), weight=weight)
    book = WindowBook([0, 1], 0)
    book.part(1).move(PartPhase.OPEN)
    with pytest.raises(ProtocolError, match="rank 1 closes window 0 with a weight of"):
        book.close(closed)


@pytest.mark.parametrize(
    ("samples", "options", "expected"),
    [
        ((8, 8), {"outer": "slowmo"}, ("slowmo", 1.0, 0.5)),
        ((8,) * 8, {"outer": "slowmo"}, ("slowmo", 1.0, 0.5)),
        (
            (8, 0),
            {"outer": "slowmo", "outer_lr": 0.8, "outer_momentum": 0.7},
            ("slowmo", 0.8, 0.7),
        ),
        ((8, 8), {"outer": "nesterov"}, ("nesterov", 0.7, 0.5)),
        ((8,) * 4, {}, ("nesterov", 1.0, 0.5)),
        ((8, 8), {"outer": "average"}, ("average", 1.0, 0.5)),
        # Nobody trained: momentum must not move what all hold.
        ((0, 0), {"outer": "slowmo"}, ("average", 1.0, 0.5)),
    ],
)
def test_the_outer_step_and_its_defaults(
    samples: tuple[int, ...], options: dict[str, Any], expected: tuple[object, ...]
) -> None:
    found = plan_of(samples, **options)
    assert (found.outer, found.outer_lr, found.outer_momentum) == expected


@pytest.mark.parametrize(
    ("batches", "outer"),
    [(FEW_WINDOWS * 10 - 1, "average"), (FEW_WINDOWS * 10, "nesterov")],
)
def test_a_run_of_few_windows_has_no_time_for_momentum(
    batches: int, outer: str
) -> None:
    for epochs in (1, 3):
        plan = plan_of((8, 8), epochs, (batches, 10 * epochs))
        assert plan.outer == outer


def test_what_windows_there_will_be_is_looked_at_until_el_che_has_settled() -> None:
    """Later a change of the outer step would be one in the middle of a run."""
    planner = ReductionPlanner(RunConfig(policy="cadence"), 1)

    def outer(samples: int, window_batches: int) -> str:
        pair, batches = (samples, samples), (100, window_batches)
        return plan_of(pair, batches=batches, planner=planner).outer

    for window in range(SETTLED_WINDOWS):
        long = window % 2
        assert outer(8, 10 if long else 90) == ("nesterov" if long else "average")
    # Windows in which nobody trained are not counted, nor do they step.
    assert outer(0, 90) == "average"
    assert outer(8, 90) == "nesterov"


def test_a_reduction_that_is_redone_awaits_all_members_in_its_next_attempt() -> None:
    done = Reduction(reduction(), parts_of((8, 8, 8)), begun_s=1.0)
    done.reduced(reduced(1, 0))
    done.again([0, 1])
    assert done.begun_s is None  # the death was no part of its time
    assert (done.plan.attempt, done.missing, done.reports) == (1, {0, 1}, {})


CLOSED = WindowClosed(rank=0, epoch=0, window=0, changed_buffers=())


def follow(phases: str) -> Part:
    """A rank's part of a window after these phases."""
    part = Part()
    for phase in phases.split():
        part.move(PartPhase[phase])
    return part


@pytest.mark.parametrize("phases", ["CLOSED", "CLOSING", "OPEN OPEN"])
def test_a_window_is_opened_before_it_closes_and_once(phases: str) -> None:
    with pytest.raises(TransitionError, match=f"a window cannot go .*{phases[-4:]}"):
        follow(phases)
    with pytest.raises(TransitionError, match="a window cannot go from CLOSED to"):
        follow(f"OPEN CLOSING OPEN CLOSED {phases}")


@pytest.mark.parametrize("calls", ["", "OPEN CLOSED"])
def test_a_rank_closes_an_open_window_once(calls: str) -> None:
    book = WindowBook([0, 1], 0)
    book.parts[0] = follow(calls)
    with pytest.raises(ProtocolError, match="rank 0 closes window 0, expected to"):
        book.close(CLOSED)


def test_one_reduction_runs_at_a_time_until_all_hold_its_result() -> None:
    state = WindowState(RunConfig(policy="cadence"), [Member(0, "cpu", 1)])
    with pytest.raises(TransitionError, match="before all hold its result"):
        state.commit()
    running = state.begin(Reduction(reduction(), {0: Part(), 1: Part()}))
    with pytest.raises(TransitionError, match="window 1 cannot be reduced: window 0"):
        state.begin(Reduction(reduction(1), {}))
    running.remove(0)
    with pytest.raises(TransitionError, match="before all hold its result"):
        state.commit()
    running.remove(1)
    assert state.commit() is state.last is running
    assert state.running is None


@pytest.mark.parametrize("calls", ["", "leave", "leave leave"])
def test_an_epoch_ends_and_goes_on_as_it_was(calls: str) -> None:
    life = EpochLife()
    for _ in calls.split():
        life.leave(1)
    for _ in range(2):
        assert (life.is_draining, life.is_final) == (bool(calls), False)
        with pytest.raises(TransitionError, match="an epoch cannot continue"):
            life.reopen()
        life.end()
        assert (life.is_draining, life.is_final) == (bool(calls), True)
        with pytest.raises(TransitionError, match="a window cannot be the last one"):
            life.end()
        with pytest.raises(TransitionError, match="rank 0 cannot leave its loop"):
            life.leave(0)
        life.reopen()
    assert life.left == {1 for _ in calls.split()}


def test_a_throttled_rank_is_held_for_good_once_the_slowest_has_stopped() -> None:
    throttle = Throttle(2, [0, 1])
    assert not throttle.done(0, 2)
    assert not throttle.holds(2), "rank 1 may still catch up"
    assert throttle.done(1, 1)
    assert throttle.limit == 3
    throttle.stop(1)
    assert not throttle.done(1, 5), "it runs no more"
    assert [throttle.holds(batches) for batches in (2, 3)] == [False, True]
    throttle.remove(1)
    assert (throttle.limit, throttle.is_final) == (4, False)
