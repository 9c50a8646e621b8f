"""Breaks under ``sync``, ranks that fail or vanish, and deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.messages import Abort, EpochOpened, Left, Tick
from elche.coordination.sync_policy import BREAK_PATIENCE_S
from tests.coordination.checks import positions, trained_positions
from tests.coordination.simulated import TICK_S, Device, Plan, Record, Simulation
from tests.coordination.simulated_worker import join_of, script, simulate


def break_plan(world_size: int, step: int, **changes: object) -> Plan:
    devices = tuple(
        Device(sample_s=0.002 * (1 + rank), prefetched=rank, break_at={0: step})
        for rank in range(world_size)
    )
    plan = Plan(devices=devices, policy="sync", sizes=((8, 20),), delay_s=0.002)
    return replace(plan, **changes)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("step", [0, 1, 2, 7, 19])
@pytest.mark.parametrize("seed", range(3))
def test_a_break_at_one_step_on_all_ranks_lets_sync_go_on(
    world_size: int, step: int, seed: int
) -> None:
    plan = break_plan(world_size, step, epochs=2, seed=seed, pause_s=0.01)
    record = simulate(plan)
    assert not record.aborts
    assert record.finished == set(range(world_size))
    assert trained_positions(record, 0, 1) == positions(plan)
    assert len(trained_positions(record, 0, 0)) == 8 * (step + 1)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_may_end_right_after_a_common_break(seed: int) -> None:
    """Once: Left of one rank comes before EpochLeft of another: the run is aborted.

    `elche run` then reports a failure of a run that trained to its end.
    """
    sim = Simulation(break_plan(3, 5, seed=seed), script)
    sim.run()
    assert sim.core.aborted is None


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_break_on_one_rank_ends_sync_within_the_patience(leaver: int) -> None:
    devices = [Device(), Device()]
    devices[leaver] = Device(break_at={0: 4})
    plan = Plan(
        devices=tuple(devices),
        policy="sync",
        pause_s=1e4,
        ticks=True,
        delay_s=0.001,
    )
    record = simulate(plan)
    other = 1 - leaver
    broke_s = max(end for _, _, end in record.busy)
    assert record.aborted_s[other] <= broke_s + BREAK_PATIENCE_S + 2 * TICK_S
    abort = record.aborts[other]
    assert abort.kind == "deadline"
    assert f"ranks [{other}] to leave epoch 0" in abort.reason
    assert f"ranks [{leaver}] did after step 5" in abort.reason


def test_breaks_at_different_steps_of_sync_are_told_apart() -> None:
    plan = Plan(
        devices=(Device(break_at={0: 4}), Device()), policy="sync", sizes=((8, 5),)
    )
    devices = (plan.devices[0], Device(break_at={0: 3}))
    sim = Simulation(replace(plan, devices=devices, ticks=True), script)
    record = sim.run()
    (reason,) = {abort.reason for abort in record.aborts.values()}
    assert "ranks [0] to leave epoch 0, as ranks [1] did after step 4" in reason


@st.composite
def failing(draw: st.DrawFn) -> tuple[Plan, int]:
    world_size = draw(st.integers(2, 6))
    victim = draw(st.integers(0, world_size - 1))
    devices = []
    for rank in range(world_size):
        device = Device(
            sample_s=draw(st.sampled_from([0.002, 0.005, 0.02])),
            jitter=0.1,
            prefetched=draw(st.integers(0, 4)),
        )
        if rank == victim:
            device = replace(
                device,
                fail_at_s=draw(st.floats(0.0, 1.0)),
                fail_silently=draw(st.booleans()),
            )
        devices.append(device)
    plan = Plan(
        devices=tuple(devices),
        policy=draw(st.sampled_from(["sync", "cadence"])),
        sizes=((8, 200 * world_size), (3, 1)),
        delay_s=draw(st.sampled_from([0.0, 0.003])),
        seed=draw(st.integers(0, 99)),
    )
    return plan, victim


@given(failing())
@settings(max_examples=100, deadline=None)
def test_a_rank_that_fails_or_vanishes_ends_the_run_for_all_others_at_once(
    case: tuple[Plan, int],
) -> None:
    plan, victim = case
    sim = Simulation(plan, script)
    record = sim.run()
    others = set(range(plan.world_size)) - {victim}
    assert set(record.aborts) == others
    device = plan.devices[victim]
    assert device.fail_at_s is not None
    assert sim.now_s <= device.fail_at_s + 2.5 * max(
        0.02, *(8 * other.sample_s for other in plan.devices)
    )
    for rank, abort in record.aborts.items():
        assert (abort.rank, abort.failed_rank) == (rank, victim)
        if device.fail_silently:
            assert f"rank {victim} is gone" in abort.reason
        else:
            assert f"rank {victim} failed: ValueError: x" in abort.reason
            assert abort.traceback == "T"


def hang(plan: Plan, record_of: int, at_event: int) -> tuple[Simulation, Record]:
    """Runs a plan in which one rank stops dead, its connection open."""
    sim = Simulation(plan, script)
    send = sim.send

    def deaf(event: object) -> None:
        nonlocal at_event
        if getattr(event, "rank", None) == record_of:
            at_event -= 1
            if at_event < 0:
                sim.workers[record_of].alive = False
                return
        send(event)  # type: ignore[arg-type]

    sim.send = deaf  # type: ignore[method-assign,assignment]
    return sim, sim.run()


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize(
    ("at_event", "doing"),
    [
        (0, "waiting for ranks [1] to join"),
        (1, "waiting for ranks [1] to open epoch 0"),
        (2, "[1]"),
        (9, "[1]"),
    ],
)
def test_a_rank_that_hangs_is_named_when_the_deadline_passes(
    policy: str, at_event: int, doing: str
) -> None:
    plan = Plan(
        devices=(Device(), Device(sample_s=0.02), Device()),
        policy=policy,
        config={"timeout_s": 7.0},
        sizes=((8, 300),),
        ticks=True,
    )
    sim, record = hang(plan, 1, at_event)
    assert set(record.aborts) == {0, 2}
    for abort in record.aborts.values():
        assert abort.kind == "deadline"
        assert doing in abort.reason
    deadline_s = 300.0 if at_event == 0 else 7.0
    last_s = max((end for _, _, end in record.busy), default=0.0)
    assert sim.now_s <= last_s + deadline_s + 2 * TICK_S + 1.0


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_time_that_passes_between_epochs_is_nobodys_fault(policy: str) -> None:
    plan = Plan(devices=(Device(), Device()), policy=policy, config={"timeout_s": 5.0})
    sim = Simulation(plan, script)
    sim.run()
    core = sim.core
    for second in range(1000):
        assert core.handle(Tick(), sim.now_s + second) == []


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_rank_that_leaves_while_another_opens_an_epoch_ends_the_run(
    policy: str,
) -> None:
    plan = Plan(devices=(Device(), Device()), policy=policy)
    sim = Simulation(plan, script)
    for rank in (0, 1):
        sim.core.handle(join_of(plan, rank), 0.0)
    assert sim.core.handle(Left(rank=0), 1.0) == []
    sim.core.check()
    told = sim.core.handle(EpochOpened(rank=1, epoch=0), 2.0)
    assert [type(message) for message in told] == [Abort, Abort]
    assert "ranks [0] have left" in told[0].reason  # type: ignore[union-attr]
