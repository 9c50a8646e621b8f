"""The planner: near the ideal, within memory, honest about its alternatives."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.errors import ConfigError
from elche.schedule.lowering import lower
from elche.schedule.planning.partition import ProfileTable, costs_of, link_bound
from elche.schedule.planning.partition_search import fits
from elche.schedule.planning.plan import Candidate, Plan, PlanConfig, ideal_step_s
from elche.schedule.planning.planner import plan_pipeline
from elche.schedule.planning.profile import (
    ANY_KIND,
    DeviceProfile,
    LayerProfile,
    LayerTimes,
    LinkProfile,
    PipelineProfile,
)
from elche.schedule.timing import simulate
from tests.schedule.planning.test_partition import (
    equal_layers,
    every_partition,
    profiles,
)
from tests.schedule.strategies import assert_complete

HIDDEN, VOCABULARY, TOKENS = 1024, 32_000, 1024


def layer(
    operations: tuple[int, int, int], held: int, output: int, state: int
) -> LayerProfile:
    """By the operations and bytes of a token; parameters take four bytes."""
    names = "forward_s", "input_gradient_s", "weight_gradient_s"
    times = {name: TOKENS * n for name, n in zip(names, operations, strict=True)}
    return LayerProfile(
        times={ANY_KIND: LayerTimes(**times)},
        activation_bytes=TOKENS * held,
        output_bytes=TOKENS * output,
        parameter_bytes=4 * state,
    )


def gpt(
    blocks: int,
    speeds: Sequence[float],
    memory_bytes: Sequence[float] | float = math.inf,
) -> PipelineProfile:
    """A GPT; work counts matmuls, activations as Korthikanti et al. (2022) do."""
    matmuls, attention = 24 * HIDDEN**2, 4 * TOKENS * HIDDEN
    logits, table = 2 * HIDDEN * VOCABULARY, HIDDEN * VOCABULARY
    work = matmuls + attention, matmuls + 2 * attention, matmuls
    embedding = layer((0, 0, 0), 8, 2 * HIDDEN, table)
    block = layer(work, 34 * HIDDEN, 2 * HIDDEN, 12 * HIDDEN**2)
    head = layer((logits,) * 3, 4 * VOCABULARY, 1, table)
    if isinstance(memory_bytes, float):
        memory_bytes = [memory_bytes] * len(speeds)
    return PipelineProfile(
        layers=(embedding, *(block,) * blocks, head),
        devices=tuple(
            DeviceProfile(
                name=f"device {index}", speed=50e12 * speed, memory_bytes=memory
            )
            for index, (speed, memory) in enumerate(
                zip(speeds, memory_bytes, strict=True)
            )
        ),
        link=LinkProfile(latency_s=20e-6, bytes_per_s=12e9),
    )


def check(plan: Plan, profile: PipelineProfile) -> None:
    """What is said of each candidate is true."""
    able = []
    for each in plan.alternatives:
        if each.candidate is not None:
            check_candidate(each.candidate, profile)
            assert bool(each.reason) == (each.candidate.missing_bytes > 0)
            if not each.reason:
                able.append(each.candidate.step_s)
        else:
            assert each.reason
    assert plan.chosen.missing_bytes == 0
    lowered = lower(plan.chosen.schedule, plan.chosen.costs)  # proves it deadlock-free
    assert lowered.is_lowered == (len(plan.chosen.partition.ranks) > 1)
    assert plan.chosen.step_s <= min(able) * (1 + 1e-8)
    used = set(plan.chosen.partition.devices)
    assert used | set(plan.unused) == set(range(len(profile.devices)))
    assert not used & set(plan.unused)


def check_candidate(one: Candidate, profile: PipelineProfile) -> None:
    assert_complete(one.schedule)
    assert sum(one.partition.sizes) == len(profile.layers)
    assert one.schedule.placement == one.partition.placement
    table = ProfileTable(profile, one.schedule.num_microbatches)
    timing = simulate(one.schedule, costs_of(table, one.partition))
    assert one.step_s == max(timing.makespan, link_bound(table, one.partition))
    lacks = [
        needed - profile.devices[device].memory_bytes
        for needed, device in zip(one.memory_bytes, one.partition.ranks, strict=True)
    ]
    assert one.missing_bytes == pytest.approx(max(0.0, *lacks), abs=1)


def outcome(profile: PipelineProfile, config: PlanConfig) -> Plan | str:
    """The plan, or why there is none."""
    try:
        return plan_pipeline(profile, config)
    except ConfigError as error:
        return str(error)


@given(
    profiles(most_layers=7),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(("auto", "1f1b", "zb-h1", "v-min")),
)
@settings(max_examples=20)
def test_memory_is_never_exceeded(
    profile: PipelineProfile, count: int, all_devices: bool, schedule: str
) -> None:
    config = PlanConfig(
        num_microbatches=count, schedule=schedule, use_all_devices=all_devices
    )
    plan = outcome(profile, config)
    if isinstance(plan, str):
        reasons = "memory|a layer for each|lacks|exceed|one device is enough"
        assert re.search(reasons, plan)
        if schedule == "auto" and not all_devices:
            table, layers = ProfileTable(profile, count), len(profile.layers)
            for order in permutations(range(len(profile.devices))):
                for each, _ in every_partition(layers, order, may_be_empty=True):
                    assert not fits(table, each)
        return
    for needed, device in zip(
        plan.chosen.memory_bytes, plan.chosen.partition.ranks, strict=True
    ):
        assert needed <= profile.devices[device].memory_bytes
    assert not (all_devices and plan.unused)
    if schedule == "auto":
        check(plan, profile)
    else:
        assert plan.chosen.name == schedule


@pytest.mark.parametrize(
    "blocks",
    [
        *(24, 36, 48),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (28, 32, 40, 44)),
    ],
)
def test_one_device_three_times_slower(blocks: int) -> None:
    """At most 1.12 times the time of all devices always busy."""
    profile = gpt(blocks, (1, 1, 1, 1 / 3))
    plan = plan_pipeline(profile, PlanConfig(num_microbatches=16))
    check(plan, profile)
    work_s = 16 * sum(
        each.times_on(ANY_KIND).forward_s + each.times_on(ANY_KIND).full_backward_s
        for each in profile.layers
    )
    assert plan.ideal_s == pytest.approx(work_s / 50e12 / (3 + 1 / 3))
    assert plan.ideal_s <= plan.chosen.step_s <= 1.12 * plan.ideal_s
    assert plan.equal_split is not None
    assert plan.equal_split.step_s > 2.5 * plan.ideal_s


def test_a_device_fifty_times_slower_gets_no_layers() -> None:
    profile = gpt(24, (1, 1 / 50))
    plan = plan_pipeline(profile, PlanConfig(num_microbatches=16))
    assert plan.unused == (1,)
    alone = PipelineProfile(layers=profile.layers, devices=profile.devices[:1])
    assert plan.chosen.step_s == pytest.approx(ideal_step_s(alone, 16))
    assert {each.name for each in plan.alternatives if each.candidate is None} == {
        *("interleaved-1f1b", "interleaved-zb", "zb-v", "v-half", "v-min")
    }
    forced = plan_pipeline(
        profile, PlanConfig(num_microbatches=16, use_all_devices=True)
    )
    assert forced.unused == ()
    assert forced.chosen.step_s > plan.chosen.step_s


@pytest.mark.parametrize("ends", [(1, 0), (0, 0), (0, 2)])
def test_a_link_joins_two_devices_the_lower_first(ends: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="joins two different devices of 2"):
        replace(equal_layers(4, (1, 1)), links={ends: LinkProfile()})


def test_a_device_behind_a_slow_link_is_left_out() -> None:
    """The sum-bound of two devices is lower than one's; what counts is the step."""
    profile = replace(equal_layers(8, (1, 1)), link=LinkProfile(latency_s=30.0))
    plan = plan_pipeline(profile, PlanConfig(num_microbatches=4))
    assert plan.bound_s < 4 * 8 * 3
    assert len(plan.unused) == 1
    assert plan.chosen.step_s == 4 * 8 * 3
    near = replace(profile, link=LinkProfile(latency_s=0.5))
    assert plan_pipeline(near, PlanConfig(num_microbatches=4)).unused == ()


def test_too_little_memory_says_how_much_is_needed() -> None:
    profile = replace(
        equal_layers(6, (1, 1)),
        devices=(
            DeviceProfile(name="one", memory_bytes=61),
            DeviceProfile(name="two", memory_bytes=100),
        ),
    )
    # A layer's state is 20 bytes, its activations 10: two and three layers fit.
    with pytest.raises(
        ConfigError,
        match=r"the layers need 180 bytes .*, the largest layer \(layer\) 30; the "
        "devices have 161, each 100 at most; add devices",
    ):
        plan_pipeline(profile, PlanConfig(num_microbatches=2))
    enough = replace(profile, layers=profile.layers[:5])
    plan = plan_pipeline(enough, PlanConfig(num_microbatches=2))
    check(plan, enough)
    assert sorted(plan.chosen.partition.sizes) == [2, 3]


def test_fewer_layers_than_stages() -> None:
    profile = equal_layers(3, (1, 1))
    plan = plan_pipeline(profile, PlanConfig(num_microbatches=4))
    check(plan, profile)
    reasons = {each.name: each.reason for each in plan.alternatives}
    assert reasons["zb-v"] == "2 stages on each of 2 devices exceed 3 layers"
    with pytest.raises(ConfigError, match="zb-v cannot run here: 2 stages on each"):
        plan_pipeline(profile, PlanConfig(num_microbatches=4, schedule="zb-v"))
    crowded = equal_layers(3, (1,) * 4)
    with pytest.raises(ConfigError, match="a layer for each of 4 devices, got 3 lay"):
        plan_pipeline(crowded, PlanConfig(num_microbatches=4, use_all_devices=True))
    assert len(plan_pipeline(crowded, PlanConfig(num_microbatches=4)).unused) >= 1


def test_microbatches_that_a_schedule_does_not_allow() -> None:
    profile = equal_layers(16, (1, 1, 1, 1))
    plan = plan_pipeline(profile, PlanConfig(num_microbatches=9))
    (looped,) = (e for e in plan.alternatives if e.name == "interleaved-1f1b")
    assert looped.candidate is None
    assert "got 9 microbatches" in looped.reason
    check(plan, profile)


def test_a_whole_backward_that_is_cheaper_is_used() -> None:
    plain = equal_layers(8, (1, 1))
    layer = plain.layers[0]
    times = replace(layer.times_on(ANY_KIND), backward_s=1.2)
    cheap = replace(plain, layers=(replace(layer, times={ANY_KIND: times}),) * 8)
    plan = plan_pipeline(cheap, PlanConfig(num_microbatches=8))
    check(plan, cheap)
    assert plan.ideal_s == pytest.approx(8 * 8 * 2.2 / 2)
    assert plan.chosen.step_s < 1.2 * plan.ideal_s
    kinds = {one.kind.value for row in plan.chosen.schedule.actions for one in row}
    assert "B" in kinds


def test_the_same_plan_every_time() -> None:
    profile = gpt(24, (1, 0.7, 0.4), 6e9)
    config = PlanConfig(num_microbatches=12)
    assert plan_pipeline(profile, config) == plan_pipeline(profile, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_microbatches": 0}, "microbatches to be an int >= 1, got 0"),
        ({"num_microbatches": 2, "schedule": "2f2b"}, "a schedule among gpipe"),
        (
            {"num_microbatches": 2, "stages_per_device": 0},
            "stages_per_device to be an int >= 1",
        ),
    ],
)
def test_questions_that_make_no_sense(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("uses_all", [True, False])
def test_one_device_needs_no_several_stages(name: str, uses_all: bool) -> None:
    config = PlanConfig(num_microbatches=4, schedule=name, use_all_devices=uses_all)
    with pytest.raises(ConfigError, match="one device is enough"):
        plan_pipeline(equal_layers(6, (1.0,)), config)
