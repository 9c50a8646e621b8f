"""Breaks under ``sync``, ranks that fail, vanish or hang, and deadlines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.protocol.events import EpochOpened, Left
from elche.coordination.protocol.instructions import Abort
from elche.coordination.state import Coordinator
from elche.sim.cluster import Break, Cluster, Device, Fault, Link, SimulatedRun
from elche.sim.rank import join_of
from elche.sim.simulation import TICK_S, Simulation
from tests.harness.reached import reach
from tests.sim.checks import CHECKED, batches_of, positions, simulate, trained_positions


def broken(world_size: int, step: int, **changes: Any) -> Cluster:
    devices = tuple(
        Device(seconds_per_sample=0.002 * (1 + rank), prefetch=rank)
        for rank in range(world_size)
    )
    run = SimulatedRun(policy="sync", samples=160, batch_size=8)
    return Cluster(
        run=replace(run, **changes),
        devices=devices,
        link=Link(latency_s=0.0, spread_s=0.002),
        breaks=tuple(
            Break(rank=rank, epoch=0, batches=step + 1) for rank in range(world_size)
        ),
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("step", [0, 1, 2, 7, 19])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.every(4)
def test_a_break_at_one_step_on_all_ranks_lets_sync_go_on(
    world_size: int, step: int, seed: int
) -> None:
    cluster = broken(world_size, step, epochs=2, seed=seed, pause_s=0.01)
    history = simulate(cluster).history
    assert not history.aborts
    assert history.finished == set(range(world_size))
    assert trained_positions(history, 0, 1) == positions(cluster.run.sizes)
    assert len(trained_positions(history, 0, 0)) == 8 * (step + 1)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_break_of_one_rank_ends_the_epoch_for_all(leaver: int) -> None:
    # Once: it stalled for 60 s, and ended the run.
    cluster = Cluster(
        run=SimulatedRun(
            policy="sync", samples=160, batch_size=8, pause_s=0.01, epochs=2
        ),
        devices=(Device(seconds_per_sample=0.01, count=2),),
        breaks=(Break(rank=leaver, epoch=0, batches=5),),
    )
    history = simulate(cluster, ticks=True).history
    assert not history.aborts
    assert history.ended[0, 0] == history.ended[0, 1] == {0, 1}
    assert trained_positions(history, 0, 1) == positions(cluster.run.sizes)
    trained = [
        {start // 8 for who, start, _ in history.trained[0, 0] if who == rank}
        for rank in (leaver, 1 - leaver)
    ]
    assert trained[0] == set(range(5))
    assert set(range(5)) < trained[1] <= set(range(15)), "what was granted"


@st.composite
def failing(draw: st.DrawFn) -> tuple[Cluster, int, float]:
    world_size = draw(st.integers(2, 6))
    victim = draw(st.integers(0, world_size - 1))
    at_s = draw(st.floats(0.05, 1.0))
    cluster = Cluster(
        run=SimulatedRun(
            policy="sync",
            batch_sizes=((8, 200 * world_size), (3, 1)),
            seed=draw(st.integers(0, 99)),
        ),
        devices=tuple(
            Device(
                seconds_per_sample=draw(st.sampled_from([0.002, 0.005, 0.02])),
                jitter=0.1,
                prefetch=draw(st.integers(0, 4)),
            )
            for _ in range(world_size)
        ),
        link=Link(latency_s=0.0, spread_s=draw(st.sampled_from([0.0, 0.003]))),
        faults=(
            Fault(at_s=at_s, kill_rank=victim)
            if draw(st.booleans())
            else Fault(at_s=at_s, fail_rank=victim),
        ),
    )
    return cluster, victim, at_s


@pytest.mark.reaches("steps before it", "deaths", "failures")
@given(failing())
@settings(max_examples=60)
def test_a_rank_that_fails_or_vanishes_ends_sync_for_all_others_at_once(
    case: tuple[Cluster, int, float],
) -> None:
    """Without a launcher."""
    cluster, victim, at_s = case
    sim = Simulation(cluster, CHECKED)
    sim.core = Coordinator(cluster.world_size)
    sim.run()
    assert set(sim.history.aborts) == set(range(cluster.world_size)) - {victim}
    slowest_s = max(8 * device.seconds_per_sample for device in cluster.devices)
    assert sim.engine.now_s <= at_s + 3.0 * max(0.02, slowest_s)
    reach("steps before it", sim.history.windows)
    for rank, abort in sim.history.aborts.items():
        assert (abort.rank, abort.failed_rank) == (rank, victim)
        if cluster.faults[0].kill_rank is not None:
            assert f"rank {victim} is gone" in abort.reason
            reach("deaths")
        else:
            assert f"rank {victim} failed: ValueError: x" in abort.reason
            assert abort.traceback == "T"
            reach("failures")


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize(
    ("at_s", "doing"),
    [(0.0, "waiting for ranks [1] to join"), (0.0015, "[1]"), (0.5, "[1]")],
)
def test_a_rank_that_hangs_is_named_when_the_deadline_passes(
    policy: str, at_s: float, doing: str
) -> None:
    speeds = (0.01, 0.02, 0.01)
    cluster = Cluster(
        run=SimulatedRun(
            policy=policy, samples=2400, batch_size=8, options={"timeout_s": 7.0}
        ),
        devices=tuple(Device(seconds_per_sample=s) for s in speeds),
        faults=(Fault(at_s=at_s, hang_rank=1),),
    )
    sim = simulate(cluster)
    assert set(sim.history.aborts) == {0, 2}
    for abort in sim.history.aborts.values():
        assert abort.kind == "deadline"
        silent = "ranks [0, 1, 2]" if policy == "sync" and at_s else doing
        assert silent in abort.reason  # a step of sync ends on all ranks or on none
    deadline_s = 300.0 if at_s == 0.0 else 7.0
    last_s = max(
        (each.start_s + each.duration_s for each in batches_of(sim)), default=0.0
    )
    assert sim.engine.now_s <= last_s + deadline_s + 2 * TICK_S + 1.0


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_rank_that_leaves_while_another_opens_an_epoch_ends_the_run(
    policy: str,
) -> None:
    device = Device(seconds_per_sample=0.01, count=2)
    cluster = Cluster(run=SimulatedRun(policy=policy, samples=160), devices=(device,))
    core = Simulation(cluster).core
    for rank in (0, 1):
        core.handle(join_of(cluster, rank, device), 0.0)
    assert core.handle(Left(rank=0), 1.0) == []
    core.check()
    told = core.handle(EpochOpened(rank=1, epoch=0), 2.0)
    aborts = [message for message in told if isinstance(message, Abort)]
    assert len(aborts) == len(told) == 2
    assert "ranks [0] have left" in aborts[0].reason
