"""The auto scheduler: never worse than what is published, within memory, and useful."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.errors import ConfigError
from elche.schedule.actions import Kind, loop_placement, v_placement
from elche.schedule.costs import PipelineCosts, RankTimes, StageCost, equal_costs
from elche.schedule.generators.auto import auto_placed, auto_schedule
from elche.schedule.generators.schedules import (
    FIXED_SCHEDULES,
    fits_placement,
    make_schedule,
)
from elche.schedule.lowering import lower
from elche.schedule.timing import CostTable, simulate
from tests.schedule.strategies import assert_complete, costs_on, named, placements


def best_fixed(costs: PipelineCosts, count: int) -> float:
    """The least makespan of all published schedules that fit."""
    times = [float("inf")]
    for name in FIXED_SCHEDULES:
        if fits_placement(name, costs):
            try:
                schedule = make_schedule(name, costs, count)
            except ConfigError:  # memory, or the number of microbatches
                continue
            times.append(simulate(schedule, costs).makespan)
    return min(times)


def least_memory(costs: PipelineCosts) -> tuple[float, ...]:
    """What one microbatch needs on each rank."""
    held = [0.0] * costs.num_ranks
    for one, rank in zip(costs.stages, costs.placement, strict=True):
        held[rank] += one.activation
    return tuple(each or 1.0 for each in held)


@given(named(), st.none() | st.integers(1, 9))
@settings(max_examples=40)
def test_never_worse_than_the_published(
    case: tuple[str, PipelineCosts, int, int], memory: int | None
) -> None:
    _, costs, count, _ = case
    if memory is not None:
        costs = replace(
            costs, memory=tuple(memory * each for each in least_memory(costs))
        )
    schedule = auto_schedule(costs, count)
    assert_complete(schedule)
    timing = simulate(schedule, costs)
    assert timing.makespan <= best_fixed(costs, count) * (1 + 1e-9)
    assert timing.makespan >= count * max(CostTable(costs).work) * (1 - 1e-9)
    for peak, limit in zip(timing.peak_activations, costs.limits, strict=True):
        assert peak <= limit + 1e-6


@given(placements(), st.integers(1, 7), st.sampled_from((1.0, 1.5, 3.0)), st.data())
@settings(max_examples=40)
def test_any_placement_within_any_memory(
    placed: tuple[tuple[int, ...], int], count: int, factor: float, data: st.DataObject
) -> None:
    placement, ranks = placed
    costs = data.draw(costs_on(placement, ranks))
    costs = replace(costs, memory=tuple(factor * each for each in least_memory(costs)))
    schedule = auto_schedule(costs, count)
    assert_complete(schedule)
    timing = simulate(lower(schedule, costs), costs)
    assert timing.makespan == pytest.approx(simulate(schedule, costs).makespan)
    for peak, limit in zip(timing.peak_activations, costs.limits, strict=True):
        assert peak <= limit + 1e-6


def test_unequal_stages_are_worth_their_own_order() -> None:
    """A search over costs finds more than the best list that ignores them."""
    gains = []
    for seed in range(6):
        draw = random.Random(seed).uniform
        costs = PipelineCosts(
            stages=tuple(
                StageCost(
                    forward=draw(0.5, 2.0),
                    input_gradient=draw(0.5, 2.0),
                    weight_gradient=draw(0.1, 1.5),
                )
                for _ in range(8)
            ),
            placement=loop_placement(8),
            num_ranks=8,
            links=(draw(0.0, 0.5),) * 7,
            memory=(8.0,) * 8,
        )
        makespan = simulate(auto_schedule(costs, 32), costs).makespan
        gains.append(best_fixed(costs, 32) / makespan - 1)
    assert sum(gain > 0.001 for gain in gains) >= 3


def test_the_whole_backward_is_taken_where_the_split_costs_too_much() -> None:
    dear = StageCost(forward=1.0, input_gradient=2.0, weight_gradient=2.0, backward=2.0)
    fair = StageCost(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
    costs = PipelineCosts(
        stages=(fair, dear, fair, fair), placement=loop_placement(4), num_ranks=4
    )
    schedule = auto_schedule(costs, 8)
    kinds = {
        stage: {
            one.kind for row in schedule.actions for one in row if one.stage == stage
        }
        for stage in range(4)
    }
    assert kinds[1] == {Kind.FORWARD, Kind.FULL_BACKWARD}
    assert simulate(schedule, costs).makespan < 8 * 4.0


def test_memory_below_one_microbatch_is_rejected() -> None:
    costs = equal_costs(RankTimes(1.0, 1.0, 1.0), loop_placement(2), 2, memory=0.5)
    with pytest.raises(ConfigError, match=r"rank 0 needs 1 units .* its limit is 0\.5"):
        auto_schedule(costs, 4)
    with pytest.raises(ConfigError, match=r"its limit is 0\.5"):
        auto_placed(RankTimes(1.0, 1.0, 1.0), 2, 4, memory=0.5)


@pytest.mark.parametrize(
    ("ranks", "count", "message"),
    [(0, 4, "ranks to be an int >= 1"), (4, 0, "microbatches to be an int")],
)
def test_nothing_to_schedule(ranks: int, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        auto_placed(RankTimes(1.0, 1.0, 1.0), ranks, count)


def test_no_time_at_all() -> None:
    costs = equal_costs(RankTimes(0.0, 0.0, 0.0), v_placement(3), 3)
    timing = simulate(auto_schedule(costs, 4), costs)
    assert (timing.makespan, timing.bubble_span, timing.bubble_makespan) == (0, 0, 0)
