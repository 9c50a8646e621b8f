"""Whole runs under both policies in virtual time: all of the data, once, to the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordination.checks import (
    check_run,
    check_windows,
    positions,
    trained_positions,
)
from tests.coordination.simulated import Device, Plan, Record
from tests.coordination.simulated_worker import simulate

MIN_STEP_S = 0.004


@st.composite
def devices(draw: st.DrawFn, breaks: bool = False) -> Device:
    break_at = st.dictionaries(st.integers(0, 2), st.integers(1, 9), max_size=2)
    return Device(
        sample_s=draw(st.sampled_from([0.0005, 0.001, 0.0025, 0.01, 0.04])),
        fixed_s=draw(st.sampled_from([MIN_STEP_S, 0.02])),
        jitter=draw(st.sampled_from([0.0, 0.1, 0.4])),
        prefetched=draw(st.integers(0, 8)),
        draw_s=draw(st.sampled_from([0.0, 0.0003])),
        cold_s=draw(st.sampled_from([0.0, 1.0])),
        break_at=draw(break_at) if breaks else {},
    )


@st.composite
def sizes(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    samples, count = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    tail = draw(st.integers(0, samples - 1))
    if tail:
        return ((samples, count), (tail, 1))
    odd = draw(st.booleans())
    return ((samples, count), (samples + 1, 2), (1, 1)) if odd else ((samples, count),)


@st.composite
def plans(draw: st.DrawFn, policy: str, breaks: bool = False) -> Plan:
    config = {"timeout_s": 300.0}
    if policy == "cadence":
        config |= {
            "anchor": draw(st.sampled_from([1, 1, 3, 10])),
            "max_anchor": draw(st.sampled_from([200, 200, 10, 1])),
            "max_batch_diff": draw(st.sampled_from([None, None, 0, 2])),
            "drift_weights": draw(st.sampled_from(["equal", "samples", "sqrt"])),
        }
    world_size = draw(st.integers(1, 8))
    members = st.lists(devices(breaks), min_size=world_size, max_size=world_size)
    return Plan(
        devices=tuple(draw(members)),
        policy=policy,
        config=config,
        sizes=draw(sizes()),
        epochs=draw(st.integers(1, 3)),
        sync_s=draw(st.sampled_from([0.0001, 0.003, 0.05])),
        delay_s=draw(st.sampled_from([0.0, 0.001, MIN_STEP_S / 2])),
        pause_s=draw(st.sampled_from([0.0, 0.05])),
        min_share_samples=draw(st.sampled_from([1, 1, 2])),
        seed=draw(st.integers(0, 999)),
    )


def late_grants(plan: Plan, record: Record) -> list[tuple[int, str, float, float]]:
    """Waits for a grant of any step but an epoch's first."""
    return [
        wait
        for wait in record.waits
        if wait[1].startswith("grant ") and wait[1] != "grant 0" and wait[3] > wait[2]
    ]


@given(plans("sync"))
@settings(max_examples=120, deadline=None)
def test_sync_trains_on_every_position_once_and_never_waits_for_a_grant(
    plan: Plan,
) -> None:
    record = simulate(plan)
    check_run(plan, record)
    assert late_grants(plan, record) == []


@given(plans("cadence"))
@settings(max_examples=150, deadline=None)
def test_cadence_trains_on_every_position_once_in_common_windows(plan: Plan) -> None:
    check_run(plan, simulate(plan))


@given(plans("cadence", breaks=True))
@settings(max_examples=80, deadline=None)
def test_a_break_on_any_rank_ends_the_epoch_of_cadence_for_all_with_a_commit(
    plan: Plan,
) -> None:
    record = simulate(plan)
    assert not record.aborts
    check_windows(plan, record)
    everything = positions(plan)
    for epoch in range(plan.epochs):
        assert record.ended[0, epoch] == set(range(plan.world_size))
        trained = trained_positions(record, 0, epoch)
        assert trained <= everything
        if not any(epoch in device.break_at for device in plan.devices):
            assert trained == everything


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize(("world_size", "batches"), [(16, 7), (32, 3), (32, 120)])
def test_many_ranks_share_few_and_many_batches(
    policy: str, world_size: int, batches: int
) -> None:
    plan = Plan(
        devices=tuple(
            Device(sample_s=0.001 * (1 + rank % 5), jitter=0.1, prefetched=rank % 9)
            for rank in range(world_size)
        ),
        policy=policy,
        sizes=((20, batches), (3, 1)),
        epochs=2,
        delay_s=0.002,
    )
    check_run(plan, simulate(plan))


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_rank_alone_trains_on_everything(policy: str) -> None:
    plan = Plan(devices=(Device(prefetched=4),), policy=policy, epochs=2)
    check_run(plan, simulate(plan))


@given(plans("cadence"))
@settings(max_examples=60, deadline=None)
def test_without_el_che_every_window_is_a_batch_and_the_run_ends(plan: Plan) -> None:
    # Once: deadlock at the end of an epoch. Windows then end by count, so a rank
    # without a lease has no deadline; the others wait for it to close, and a lease
    # is looked at again only when a batch is done.
    config = {"max_anchor": 0, "timeout_s": 300.0}
    plan = replace(plan, config=config)
    check_run(plan, simulate(plan))


def test_without_el_che_the_slow_rank_closes_when_it_gets_no_more() -> None:
    # Once: as above, in its shortest form.
    plan = Plan(
        devices=(Device(sample_s=0.003), Device(sample_s=0.048)),
        config={"max_anchor": 0},
        sizes=((8, 40),),
    )
    check_run(plan, simulate(plan))
