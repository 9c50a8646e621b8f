"""Timing against another simulator, and `auto` over placements against all others.

The simulator here knows only what a schedule means: exact fractions, and the longest
path through everything that has to come before. It shares no code with
`elche.schedule.timing`.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.errors import ConfigError
from elche.schedule.actions import Kind, Schedule, StageAction
from elche.schedule.costs import PipelineCosts, RankTimes, equal_costs
from elche.schedule.generators.auto import auto_placed, auto_schedule
from elche.schedule.generators.schedules import (
    FIXED_SCHEDULES,
    make_schedule,
    placement_for,
)
from elche.schedule.timing import Timing, simulate
from tests.schedule.strategies import costs_on, named, placements

F, I, W, B = (  # noqa: E741 - the field's letters
    *(Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    Kind.FULL_BACKWARD,
)


def starts_of(schedule: Schedule, costs: PipelineCosts) -> dict[StageAction, Fraction]:
    """When each action of a compute-only schedule begins."""
    before = {
        one: row[at - 1] if at else None
        for row in schedule.actions
        for at, one in enumerate(row)
    }
    starts = dict.fromkeys(before, Fraction(0))
    for _ in range(len(starts) + 1):
        found = {
            one: max(
                [Fraction(0)]
                + [
                    starts[source] + length(source, costs) + way
                    for source, way in needs(one, before[one], costs, starts)
                ]
            )
            for one in starts
        }
        if found == starts:
            return starts
        starts = found
    raise AssertionError("a cycle: each of these waits for another")


def needs(
    one: StageAction,
    before: StageAction | None,
    costs: PipelineCosts,
    known: dict[StageAction, Fraction],
) -> list[tuple[StageAction, Fraction]]:
    """What an action waits for, and how long the message takes."""
    found = [] if before is None else [(before, Fraction(0))]
    if one.kind is W:
        return found
    source = one.stage - 1 if one.kind is F else one.stage + 1
    if not 0 <= source < len(costs.stages):
        return found
    here, there = costs.placement[one.stage], costs.placement[source]
    is_free = here == there or not costs.links
    way = Fraction(0) if is_free else Fraction(costs.links[min(one.stage, source)])
    kinds = (F,) if one.kind is F else (I, B)
    sources = [StageAction(source, kind, one.microbatch) for kind in kinds]
    return [*found, *((each, way) for each in sources if each in known)]


def length(one: StageAction, costs: PipelineCosts) -> Fraction:
    """Time of an action."""
    stage = costs.stages[one.stage]
    inputs, weights = Fraction(stage.input_gradient), Fraction(stage.weight_gradient)
    whole = inputs + weights if stage.backward is None else Fraction(stage.backward)
    return {F: Fraction(stage.forward), I: inputs, W: weights, B: whole}[one.kind]


def peak_of(row: tuple[StageAction, ...], costs: PipelineCosts) -> Fraction:
    """Most that a rank holds: F takes, W or B gives back."""
    held, most = Fraction(0), Fraction(0)
    for one in row:
        whole = Fraction(costs.stages[one.stage].activation)
        held += {F: whole, I: Fraction(0), W: -whole, B: -whole}[one.kind]
        most = max(most, held)
    assert held == 0
    return most


def check_timing(schedule: Schedule, costs: PipelineCosts) -> Timing:
    """Every figure of `simulate` follows from the start times found here."""
    timing, starts = simulate(schedule, costs), starts_of(schedule, costs)
    rows = [row for row in schedule.actions if row]
    for row, told in zip(schedule.actions, timing.action_starts, strict=True):
        assert list(told) == pytest.approx([float(starts[one]) for one in row])
    begins = [starts[row[0]] for row in rows]
    ends = [starts[row[-1]] + length(row[-1], costs) for row in rows]
    busy = [sum(length(one, costs) for one in row) for row in rows]
    makespan = max(ends) - min(begins)
    span = max(end - begin for begin, end in zip(begins, ends, strict=True))
    assert timing.makespan == pytest.approx(float(makespan))
    assert max(timing.spans) == pytest.approx(float(span))
    if makespan > 0:
        assert timing.bubble_makespan == pytest.approx(float(1 - max(busy) / makespan))
    if span > 0:
        assert timing.bubble_span == pytest.approx(float(1 - max(busy) / span))
    assert timing.peak_activations == pytest.approx(
        [float(peak_of(row, costs)) for row in schedule.actions]
    )
    return timing


@given(named())
@settings(max_examples=12)
def test_published_schedules_take_what_another_simulator_says(
    case: tuple[str, PipelineCosts, int, int],
) -> None:
    name, costs, count, _ = case
    check_timing(make_schedule(name, costs, min(count, 8)), costs)


@given(placements(), st.integers(1, 5), st.data())
@settings(max_examples=20)
def test_auto_schedules_take_what_another_simulator_says(
    placed: tuple[tuple[int, ...], int], count: int, data: st.DataObject
) -> None:
    costs = data.draw(costs_on(*placed))
    check_timing(auto_schedule(costs, count), costs)


TIMES = st.floats(0.0, 3.0).map(lambda time: round(time, 2))


@given(
    st.builds(RankTimes, TIMES, TIMES, TIMES, st.sampled_from((0.0, 0.05, 0.5, 2.0))),
    st.integers(1, 5),
    st.integers(1, 11),
    st.sampled_from((None, 1.0, 1.5, 0.5, 2.0)),
    st.integers(1, 4),
)
@settings(max_examples=25)
def test_auto_over_placements_is_never_worse_than_any_published_schedule(
    times: RankTimes, ranks: int, count: int, share: float | None, most_stages: int
) -> None:
    """Under the same memory, here 1/2 to 2 times that of 1F1B, at least what one needs.

    Interleaved schedules of up to as many stages per rank as auto may try.
    """
    memory = None if share is None else max(1.0, share * ranks)
    schedule, costs = auto_placed(times, ranks, count, memory, most_stages)
    assert len(costs.stages) <= max(2, most_stages) * ranks
    timing = simulate(schedule, costs)
    assert memory is None or max(timing.peak_activations) <= memory + 1e-6
    for name in FIXED_SCHEDULES:
        chunks: tuple[int | None, ...] = (None,)
        if name in ("gpipe", "interleaved-1f1b", "interleaved-zb"):
            chunks = tuple(range(1, most_stages + 1))
        for each in chunks:
            placement = placement_for(name, ranks, each)
            fixed = equal_costs(times, placement, ranks, memory)
            try:
                other = make_schedule(name, fixed, count)
            except ConfigError:  # memory, or the number of microbatches
                continue
            most = simulate(other, fixed).makespan
            assert timing.makespan <= most * (1 + 1e-9) + 1e-12, (name, each)
