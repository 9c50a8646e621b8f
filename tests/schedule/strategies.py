"""Random pipelines for the property tests, and what every schedule must fulfil."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from elche.schedule.actions import Kind, Schedule, StageAction
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.generators.schedules import FIXED_SCHEDULES, placement_for

# Quarters, so that sums are exact and times can tie, and zero.
QUARTERS = st.integers(0, 12).map(lambda n: n / 4)


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCost:
    inputs, weights = draw(QUARTERS), draw(QUARTERS)
    return StageCost(
        forward=draw(QUARTERS),
        input_gradient=inputs,
        weight_gradient=weights,
        backward=draw(st.none() | st.just(0.75 * (inputs + weights))),
        activation=draw(st.integers(1, 4)) / 2,
    )


@st.composite
def costs_on(
    draw: st.DrawFn, placement: tuple[int, ...], num_ranks: int
) -> PipelineCosts:
    stages = len(placement)
    return PipelineCosts(
        stages=tuple(draw(stage_costs()) for _ in range(stages)),
        placement=placement,
        num_ranks=num_ranks,
        links=draw(
            st.just(())
            | st.lists(QUARTERS, min_size=stages - 1, max_size=stages - 1).map(tuple)
        ),
    )


@st.composite
def placements(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Any placement: uneven numbers of stages, ranks without any, any order."""
    num_ranks = draw(st.integers(1, 5))
    stages = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=7))
    return tuple(stages), num_ranks


@st.composite
def named(draw: st.DrawFn) -> tuple[str, PipelineCosts, int, int]:
    """A published schedule: name, costs, microbatches, stages per rank."""
    name = draw(st.sampled_from(FIXED_SCHEDULES))
    num_ranks = draw(st.integers(1, 6))
    chunks = 1
    if name.startswith("interleaved"):
        chunks = draw(st.integers(1, 4))
    elif name in ("zb-v", "v-half", "v-min"):
        chunks = 2
    count = draw(st.integers(1, 14))
    if name.startswith("interleaved"):
        count -= count % max(1, count // num_ranks)
    placement = placement_for(name, num_ranks, chunks)
    return name, draw(costs_on(placement, num_ranks)), count, chunks


def assert_complete(schedule: Schedule) -> None:
    """Each stage has one F per microbatch, and B, or I and then W, on its rank."""
    counted = Counter(one for row in schedule.actions for one in row if one.is_compute)
    assert set(counted.values()) == {1}
    for rank, row in enumerate(schedule.actions):
        at = {one: position for position, one in enumerate(row)}
        for stage in schedule.stages_of(rank):
            for each in range(schedule.num_microbatches):
                forward, whole, inputs, weights = (
                    at.pop(StageAction(stage, kind, each), None)
                    for kind in (
                        Kind.FORWARD,
                        Kind.FULL_BACKWARD,
                        Kind.BACKWARD_INPUT,
                        Kind.BACKWARD_WEIGHT,
                    )
                )
                assert forward is not None
                if whole is None:
                    assert inputs is not None
                    assert weights is not None
                    assert forward < inputs < weights
                else:
                    assert (inputs, weights) == (None, None)
                    assert forward < whole
        assert not any(one.is_compute for one in at)
