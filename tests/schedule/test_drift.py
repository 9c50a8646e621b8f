"""When measured times are another plan's, and what is planned for them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.errors import ConfigError
from elche.schedule.actions import Kind, StageAction, loop_placement, parse_action
from elche.schedule.costs import PipelineCosts, RankTimes, StageCost, equal_costs
from elche.schedule.drift import (
    DriftWatch,
    arrivals,
    drift_between,
    measured_costs,
    replan,
    times_of,
    usual_times,
)
from elche.schedule.generators.auto import auto_schedule
from elche.schedule.generators.schedules import make_schedule
from elche.schedule.lowering import lower
from elche.schedule.planning.layer_costs import (
    LayerCosts,
    assumed_costs,
    best_sizes,
    best_stages,
    check_sizes,
    corrected,
    stage_costs,
    total_of,
)
from elche.schedule.timing import simulate

RANKS = 4
EQUAL = equal_costs(RankTimes(1.0, 1.0, 1.0), loop_placement(RANKS), RANKS)


def slowed(costs: PipelineCosts, stage: int, factor: float) -> PipelineCosts:
    """One stage takes longer."""
    stages = list(costs.stages)
    one = stages[stage]
    stages[stage] = replace(
        one,
        forward=one.forward * factor,
        input_gradient=one.input_gradient * factor,
        weight_gradient=one.weight_gradient * factor,
    )
    return replace(costs, stages=tuple(stages))


def all_slowed(costs: PipelineCosts, factors: list[float]) -> PipelineCosts:
    """Every stage by a factor of its own."""
    for stage, factor in enumerate(factors):
        costs = slowed(costs, stage, factor)
    return costs


def test_times_are_means_without_waiting_and_with_messages() -> None:
    rows = [
        *(("0F0", 0.0, 2.0, 0.5), ("0SEND_F0", 2.0, 2.5, 0.0)),
        *(("0F1", 3.0, 5.0, 0.0), ("0SEND_F1", 5.0, 5.25, 0.0)),
        *(("0RECV_B0", 6.0, 6.0, 0.0), ("0B0", 6.0, 16.0, 6.0)),
        ("0B1", 16.0, 18.0, 0.0),
    ]
    trace = [(parse_action(text), begin, end) for text, begin, end, _ in rows]
    found = times_of(trace, [waited for *_, waited in rows])
    # F: 2 - 0.5 + 0.5 and 2 + 0.25; B: 10 - 6 and 2.
    assert found == {0: (pytest.approx(2.125), pytest.approx(3.0), 0.0, 0.0)}


def test_one_odd_step_of_several_does_not_count() -> None:
    steps = [{1: (2.0, 3.0, 0.0, 0.0)}, {1: (9.0, 9.0, 0.0, 0.0)}]
    assert usual_times([*steps, {1: (2.5, 2.0, 0.0, 0.0)}]) == {1: (2.5, 3.0, 0.0, 0.0)}


def test_measured_times_take_the_place_of_planned_ones() -> None:
    planned = replace(EQUAL, links=(0.5,) * 3)
    times = dict.fromkeys(range(4), (2.0, 6.0, 0.0, 0.0))
    times[1] = (2.0, 0.0, 1.0, 5.0)
    found = measured_costs(planned, times)
    assert found.stages[0].full_backward == 6.0
    assert found.stages[0].input_gradient == found.stages[0].weight_gradient == 3.0
    assert found.stages[1].full_backward == 6.0
    assert found.stages[1].weight_gradient == 5.0
    assert found.links == pytest.approx((0.5 * 8 / 3,) * 3)
    with pytest.raises(ConfigError, match=r"got none of \[2\]"):
        measured_costs(planned, {0: times[0], 1: times[1], 3: times[3]})


def test_only_shares_count() -> None:
    assert drift_between(EQUAL, all_slowed(EQUAL, [7.0] * RANKS)) == pytest.approx(0)
    # Twice as long in one of four: 2 / 5 of the whole instead of 1 / 4.
    assert drift_between(EQUAL, slowed(EQUAL, 2, 2.0)) == pytest.approx(0.6)


@given(seed=st.integers(0, 10_000))
def test_jitter_changes_nothing(seed: int) -> None:
    drawn = random.Random(seed)
    watch = DriftWatch(EQUAL, 0.25)
    for _ in range(40):
        factors = [drawn.uniform(0.9, 1.1) for _ in range(RANKS)]
        assert watch.observe(all_slowed(EQUAL, factors)) is None
    assert watch.planned is EQUAL


def test_one_odd_step_changes_nothing() -> None:
    watch = DriftWatch(EQUAL, 0.25)
    for _ in range(5):
        assert watch.observe(slowed(EQUAL, 1, 4.0)) is None
        assert watch.observe(EQUAL) is None


@given(factor=st.floats(1.6, 20.0), stage=st.integers(0, RANKS - 1))
def test_a_lasting_change_is_taken_once(factor: float, stage: int) -> None:
    watch = DriftWatch(EQUAL, 0.25)
    assert watch.observe(slowed(EQUAL, stage, factor)) is None
    found = watch.observe(slowed(EQUAL, stage, 1.02 * factor))
    assert found is not None
    assert found.stages[stage].forward == pytest.approx(1.01 * factor)
    for _ in range(20):
        assert watch.observe(slowed(EQUAL, stage, factor)) is None


def test_the_schedule_follows_the_times_within_the_memory_it_has() -> None:
    placement = (0, 1, 2, 3)
    flat = equal_costs(RankTimes(1.0, 1.0, 1.0), placement, RANKS)
    running = lower(make_schedule("1f1b", flat, 12), flat)
    uneven = all_slowed(flat, [1.0, 1.0, 1.0, 0.4])
    found = replan(running, uneven)
    assert found.schedule is not None
    assert found.kept_makespan == simulate(running, uneven).makespan
    assert found.makespan < 0.98 * found.kept_makespan
    timing = simulate(found.schedule, uneven)
    assert timing.makespan == found.makespan
    before = simulate(running, uneven).peak_activations
    for now, limit in zip(timing.peak_activations, before, strict=True):
        assert now <= limit + 1e-6


def test_a_schedule_that_is_good_already_stays() -> None:
    running = lower(auto_schedule(EQUAL, 8), EQUAL)
    found = replan(running, EQUAL)
    assert found.schedule is None
    assert found.makespan == found.kept_makespan


def test_messages_are_expected_when_they_are_sent() -> None:
    costs = replace(EQUAL, links=(0.25,) * 3)
    schedule = lower(make_schedule("1f1b", costs, 4), costs)
    found, makespan = arrivals(schedule, costs)
    receives = {one for row in schedule.actions for one in row if "RECV" in str(one)}
    assert found.keys() == receives
    assert found[StageAction(1, Kind.RECV_F, 0)] == pytest.approx(1.25)
    assert found[StageAction(3, Kind.RECV_F, 0)] == pytest.approx(3.75)
    # The last stage has run F0 and B0, 1 + 2.
    assert found[StageAction(2, Kind.RECV_B, 0)] == pytest.approx(3.75 + 3 + 0.25)
    assert makespan == simulate(schedule, costs).makespan
    assert max(found.values()) < makespan


def layers(times: list[list[float]]) -> LayerCosts:
    """Layers by rank, F, I and W alike."""
    return LayerCosts(
        by_rank=tuple(
            tuple(
                StageCost(forward=t, input_gradient=t, weight_gradient=t, activation=1)
                for t in row
            )
            for row in times
        )
    )


def test_stages_are_sums_of_layers_where_they_stand() -> None:
    costs = layers([[1.0, 2.0, 4.0], [10.0, 20.0, 40.0]])
    found = stage_costs(costs, (1, 0), (1, 2))
    assert [one.forward for one in found.stages] == [10.0, 6.0]
    assert [one.activation for one in found.stages] == [1.0, 2.0]
    assert found.num_ranks == 2


def test_layers_of_stages_are_taken_as_alike() -> None:
    stages = stage_costs(layers([[1.0] * 6, [3.0] * 6]), (0, 1), (4, 2))
    found = assumed_costs(replace(stages, links=(0.5,)), (4, 2))
    assert [one.forward for one in found.by_rank[0]] == pytest.approx([1.0] * 6)
    assert [one.forward for one in found.by_rank[1]] == pytest.approx([3.0] * 6)
    assert found.link == 0.5
    alone = assumed_costs(replace(stages, num_ranks=3), (4, 2))
    # A rank without layers is as fast as the others on average: (1 + 3) / 2.
    assert alone.by_rank[2][0].forward == pytest.approx(2.0)


def test_profiles_are_corrected_by_rank() -> None:
    profiled = layers([[1.0, 2.0, 3.0]] * 2)
    planned = stage_costs(profiled, (0, 1), (2, 1))
    found = corrected(profiled, planned, slowed(planned, 1, 3.0))
    assert [one.forward for one in found.by_rank[0]] == [1.0, 2.0, 3.0]
    assert [one.forward for one in found.by_rank[1]] == pytest.approx([3.0, 6.0, 9.0])


def test_layers_go_where_they_are_fast() -> None:
    costs = layers([[1.0] * 12, [3.0] * 12])
    assert best_sizes(costs, (0, 1), (6, 6), 16) == (9, 3)
    ranks, sizes = best_stages(costs, 16, "1f1b", 2)
    by_rank = dict(zip(ranks, sizes, strict=True))
    assert by_rank == {0: 9, 1: 3}


def test_memory_holds_layers_with_their_state_and_activations() -> None:
    costs = replace(layers([[1.0] * 4] * 2), memory=(25.0, 90.0), state=(10.0,) * 4)
    assert stage_costs(costs, (0, 1), (2, 2)).memory == (5.0, 70.0)
    assert stage_costs(costs, (0, 1, 0), (1, 2, 1)).memory == (5.0, 70.0)
    with pytest.raises(ConfigError, match=r"rank 0 may hold 25 .* state take 30; give"):
        stage_costs(costs, (0, 1), (3, 1))
    full = replace(costs, memory=(20.0, 90.0))
    with pytest.raises(ConfigError, match="memory"):
        auto_schedule(stage_costs(full, (0, 1), (2, 2)), 4)


def test_layers_go_where_there_is_memory_for_them() -> None:
    # The fast rank holds three layers, each with 10 units and 1 of each microbatch.
    costs = replace(
        layers([[1.0] * 12, [3.0] * 12]),
        memory=(43.0, math.inf),
        state=(10.0,) * 12,
    )
    assert best_sizes(costs, (0, 1), (2, 10), 16) == (3, 9)
    ranks, sizes = best_stages(costs, 16, "1f1b", 2)
    assert dict(zip(ranks, sizes, strict=True)) == {0: 3, 1: 9}
    assert best_sizes(replace(costs, memory=(9.0, 9.0)), (0, 1), (6, 6), 16) == (6, 6)


def test_a_rank_that_costs_more_than_it_brings_gets_no_layers() -> None:
    ranks, sizes = best_stages(layers([[1.0] * 4, [50.0] * 4]), 8, "1f1b", 2)
    assert (ranks, sizes) == ((0,), (4,))


@pytest.mark.parametrize(
    ("sizes", "placement"),
    [((2, 2, 1), (0, 1)), ((5,), (0, 1)), ((6, -1), (0, 1)), ((2.5, 2.5), (0, 1))],
)
def test_counts_must_be_a_partition(sizes: list[int], placement: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected counts of 5 layers for 2 stages"):
        check_sizes(sizes, placement, 5, 2)


def test_places_must_be_ranks() -> None:
    check_sizes((5, 0), (1, 0), 5, 2)
    with pytest.raises(ConfigError, match=r"ranks 0 to 1 as the placement, got \[0, 2"):
        check_sizes((3, 2), (0, 2), 5, 2)


def test_totals_take_the_cheaper_backward() -> None:
    one = StageCost(forward=1, input_gradient=2, weight_gradient=2, backward=3)
    assert total_of(one) == 4
