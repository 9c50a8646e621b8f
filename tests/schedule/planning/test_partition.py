"""The exact partition against every partition there is, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elche.schedule.costs import PipelineCosts
from elche.schedule.generators.auto import auto_schedule
from elche.schedule.planning.device_orders import ALL_ORDERS, device_orders
from elche.schedule.planning.partition import (
    Partition,
    ProfileTable,
    best_partition,
    costs_of,
    link_bound,
    sum_bound,
)
from elche.schedule.planning.partition_search import Evaluator, fits, refine
from elche.schedule.planning.profile import (
    ANY_KIND,
    DeviceProfile,
    LayerProfile,
    LayerTimes,
    LinkProfile,
    PipelineProfile,
)
from elche.schedule.timing import simulate

TIMES = st.integers(0, 8).map(lambda n: n / 4)


@st.composite
def layer_times(draw: st.DrawFn) -> LayerTimes:
    inputs, weights = draw(TIMES), draw(TIMES)
    return LayerTimes(
        forward_s=draw(TIMES),
        input_gradient_s=inputs,
        weight_gradient_s=weights,
        backward_s=draw(
            st.sampled_from((None, None, 0.75, 1.25)).map(
                lambda factor: None if factor is None else factor * (inputs + weights)
            )
        ),
    )


@st.composite
def layer_profiles(draw: st.DrawFn, kinds: tuple[str, ...]) -> LayerProfile:
    return LayerProfile(
        times={kind: draw(layer_times()) for kind in kinds},
        activation_bytes=draw(st.integers(0, 5)),
        output_bytes=draw(st.integers(0, 4)),
        parameter_bytes=draw(st.integers(0, 3)),
    )


@st.composite
def profiles(
    draw: st.DrawFn, most_layers: int = 6, limited: bool = True
) -> PipelineProfile:
    kinds = draw(st.sampled_from(((ANY_KIND,), ("a", "b"))))
    count = draw(st.integers(1, 3))
    links = st.builds(
        LinkProfile, latency_s=TIMES, bytes_per_s=st.sampled_from((math.inf, 4.0))
    )
    pairs = list(combinations(range(count), 2))
    memory = st.just(math.inf)
    if limited:
        memory |= st.integers(5, 60).map(float)
    return PipelineProfile(
        layers=tuple(
            draw(st.lists(layer_profiles(kinds), min_size=1, max_size=most_layers))
        ),
        devices=tuple(
            DeviceProfile(
                name=f"device {index}",
                kind=draw(st.sampled_from(kinds)),
                speed=draw(st.sampled_from((1.0, 0.5, 0.25))),
                memory_bytes=draw(memory),
            )
            for index in range(count)
        ),
        link=draw(links),
        links={pair: draw(links) for pair in pairs if draw(st.booleans())},
        state_factor=2.0,
    )


def every_partition(
    layers: int, devices: tuple[int, ...], may_be_empty: bool
) -> Iterator[tuple[Partition, tuple[int, ...]]]:
    """All partitions over places in order, and the places that they use."""
    for used in range(1, len(devices) + 1):
        if not may_be_empty and used < len(devices):
            continue
        for places in combinations(range(len(devices)), used):
            for cuts in combinations(range(1, layers), used - 1):
                bounds = (0, *cuts, layers)
                sizes = tuple(end - begin for begin, end in pairwise(bounds))
                yield Partition(tuple(devices[p] for p in places), sizes), places


def fits_places(
    table: ProfileTable,
    devices: tuple[int, ...],
    held: tuple[int, ...],
    found: Partition,
    used: tuple[int, ...],
) -> bool:
    bounds = found.boundaries
    for stage, place in enumerate(used):
        device = devices[place]
        begin, end = bounds[stage], bounds[stage + 1]
        needed = table.state[end] - table.state[begin]
        needed += held[place] * (table.activation[end] - table.activation[begin])
        if needed > table.memory[device] / devices.count(device):
            return False
    return True


@given(profiles(), st.integers(1, 4), st.booleans(), st.data())
@settings(max_examples=40)
def test_exact_against_brute_force(
    profile: PipelineProfile, count: int, may_be_empty: bool, data: st.DataObject
) -> None:
    indices = st.integers(0, len(profile.devices) - 1)
    devices = tuple(data.draw(st.lists(indices, min_size=1, max_size=4)))
    held = tuple(data.draw(st.integers(1, 3)) for _ in devices)
    assume(may_be_empty or len(devices) <= len(profile.layers))
    table = ProfileTable(profile, count)
    found = best_partition(table, devices, held, may_be_empty)
    bounds = [
        sum_bound(table, each)
        for each, used in every_partition(len(profile.layers), devices, may_be_empty)
        if fits_places(table, devices, held, each, used)
    ]
    if found is None:
        assert bounds == []
    else:
        assert sum(found.sizes) == len(profile.layers)
        assert sum_bound(table, found) == pytest.approx(min(bounds), abs=1e-9)


@given(profiles(most_layers=5, limited=False), st.integers(1, 3))
@settings(max_examples=30)
def test_the_first_order_is_the_best_of_all(
    profile: PipelineProfile, count: int
) -> None:
    table = ProfileTable(profile, count)
    bounds = [
        sum_bound(table, each)
        for order in permutations(range(len(profile.devices)))
        for each, _ in every_partition(len(profile.layers), order, may_be_empty=True)
    ]
    first = device_orders(table, held=1)[0]
    found = best_partition(table, first, (1,) * len(first))
    assert found is not None
    assert sum_bound(table, found) == pytest.approx(min(bounds), abs=1e-9)


def way_and_work(costs: PipelineCosts, count: int) -> float:
    """When all ranks end, if each waits for the first microbatch and never again."""
    most = reached = 0.0
    for stage, one in enumerate(costs.stages):
        split = one.input_gradient + one.weight_gradient
        work = count * (one.forward + min(one.full_backward, split))
        most = max(most, reached + work)
        reached += one.forward
        if stage + 1 < len(costs.stages):
            reached += costs.link(stage)
    return most


@given(profiles(limited=False), st.integers(1, 4), st.data())
@settings(max_examples=25)
def test_the_bound_is_what_no_schedule_beats(
    profile: PipelineProfile, count: int, data: st.DataObject
) -> None:
    order = tuple(data.draw(st.permutations(range(len(profile.devices)))))
    table = ProfileTable(profile, count)
    found = best_partition(table, order, (1,) * len(order))
    assert found is not None
    costs = costs_of(table, found)
    bound = sum_bound(table, found)
    assert bound >= way_and_work(costs, count) * (1 - 1e-9)
    step_s = simulate(auto_schedule(costs, count), costs).makespan
    assert max(step_s, link_bound(table, found)) >= bound * (1 - 1e-9)
    fast = replace(profile, link=LinkProfile(latency_s=0.5), links={})
    table = ProfileTable(fast, count)
    costs = costs_of(table, found)
    assert sum_bound(table, found) == pytest.approx(way_and_work(costs, count))


@given(profiles(), st.integers(1, 4), st.data())
@settings(max_examples=25)
def test_costs_keep_the_memory(
    profile: PipelineProfile, count: int, data: st.DataObject
) -> None:
    """What `fits` allows runs, and its peak is within the device's memory."""
    table = ProfileTable(profile, count)
    order = tuple(range(len(profile.devices)))
    devices = data.draw(st.sampled_from((order, order + order[::-1], order * 2)))
    options = [each for each, _ in every_partition(len(profile.layers), devices, True)]
    chosen = data.draw(st.sampled_from(options))
    if not fits(table, chosen):
        assert Evaluator(table).step_s(chosen) == math.inf
        return
    costs = costs_of(table, chosen)
    timing = simulate(auto_schedule(costs, count), costs)
    for rank, device in enumerate(chosen.ranks):
        needed = (
            table.held_bytes(table.state, chosen)[rank] + timing.peak_activations[rank]
        )
        memory = profile.devices[device].memory_bytes
        assert needed <= memory
        room = memory - table.held_bytes(table.state, chosen)[rank]
        assert room <= costs.limits[rank] <= room + 0.5
    assert Evaluator(table).step_s(chosen) >= link_bound(table, chosen)


@given(profiles(most_layers=8), st.integers(1, 6), st.booleans())
@settings(max_examples=25)
def test_refining_never_makes_it_worse(
    profile: PipelineProfile, count: int, is_v: bool
) -> None:
    table = ProfileTable(profile, count)
    order = tuple(range(len(profile.devices)))
    devices = order + order[::-1] if is_v else order
    start = best_partition(table, devices, (1,) * len(devices))
    assume(start is not None)
    assert start is not None
    evaluator = Evaluator(table)
    refined = refine(evaluator, start, actions=5_000)
    assert evaluator.step_s(refined) <= evaluator.step_s(start)
    assert sum(refined.sizes) == len(profile.layers)
    assert fits(table, refined)


def equal_layers(count: int, speeds: tuple[float, ...]) -> PipelineProfile:
    times = LayerTimes(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0)
    layer = LayerProfile(
        times={ANY_KIND: times},
        activation_bytes=10,
        output_bytes=100,
        parameter_bytes=5,
    )
    return PipelineProfile(
        layers=(layer,) * count,
        devices=tuple(
            DeviceProfile(name=f"device {index}", speed=speed)
            for index, speed in enumerate(speeds)
        ),
    )


def test_a_partition_is_timed_within_the_memory() -> None:
    """With room for one microbatch the devices take turns."""
    profile = equal_layers(4, (1, 1))
    tight = replace(
        profile,
        devices=tuple(replace(each, memory_bytes=60) for each in profile.devices),
    )
    halves = Partition((0, 1), (2, 2))
    loose_s = Evaluator(ProfileTable(profile, 8)).step_s(halves)
    assert loose_s == 8 * 2 * 3 + 2
    assert Evaluator(ProfileTable(tight, 8)).step_s(halves) >= 1.5 * loose_s


def test_several_messages_share_a_link() -> None:
    profile = replace(
        equal_layers(8, (1, 1)), link=LinkProfile(bytes_per_s=50.0, efficiency=1.0)
    )
    table = ProfileTable(profile, 3)
    assert link_bound(table, Partition((0, 1), (4, 4))) == 4 + 3 * 2
    assert link_bound(table, Partition((0, 1, 1, 0), (2, 2, 2, 2))) == 2 + 2 * 3 * 2


def test_orders_of_many_devices_are_sampled() -> None:
    speeds = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
    table = ProfileTable(equal_layers(24, speeds), 8)
    orders = device_orders(table, held=1)
    assert ALL_ORDERS < len(set(orders)) == len(orders) < math.factorial(6)
    assert all(sorted(order) == list(range(6)) for order in orders)
    bounds = []
    for order in orders:
        found = best_partition(table, order, (1,) * 6)
        assert found is not None
        bounds.append(sum_bound(table, found))
    assert bounds == sorted(bounds)
    equal = ProfileTable(equal_layers(24, (1.0,) * 30), 8)
    assert device_orders(equal, held=1) == [tuple(range(30))]
