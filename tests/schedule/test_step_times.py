"""Measured times of steps, and layers that are placed by them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elche.errors import ConfigError
from elche.schedule.actions import loop_placement, parse_action
from elche.schedule.costs import PipelineCosts, RankTimes, StageCost, equal_costs
from elche.schedule.generators.auto import auto_schedule
from elche.schedule.planning.layer_costs import (
    LayerCosts,
    assumed_costs,
    best_sizes,
    corrected,
    stage_costs,
)
from elche.schedule.step_times import (
    drift_between,
    measured_costs,
    times_of,
)

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


def test_memory_holds_layers_with_their_state_and_activations() -> None:
    costs = replace(layers([[1.0] * 4] * 2), memory=(25.0, 90.0), state=(10.0,) * 4)
    assert stage_costs(costs, (0, 1), (2, 2)).memory == (5.0, 70.0)
    assert stage_costs(costs, (0, 1, 0), (1, 2, 1)).memory == (5.0, 70.0)
    with pytest.raises(ConfigError, match=r"rank 0 may hold 25 .* state take 30; give"):
        stage_costs(costs, (0, 1), (3, 1))
    full = replace(costs, memory=(20.0, 90.0))
    with pytest.raises(ConfigError, match="memory"):
        auto_schedule(stage_costs(full, (0, 1), (2, 2)), 4)
